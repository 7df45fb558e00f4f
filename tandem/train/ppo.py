"""Step 3: PPO against a reward model, a reward function or both.

A step is one rollout and its updates. Departures from DeepSpeed-Chat: answers are sampled, EOS is
a trained token, advantages are whitened, several epochs and minibatches work, every coefficient
is a knob, and the ratio before the first update is measured and must be 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.checkpoint.state import State
from tandem.data.loader import BatchOrder
from tandem.engine.hybrid import RLHFEngine
from tandem.errors import BadStepError, ConfigError, DataError
from tandem.metrics.log import Answer, MetricLog, MutedLog
from tandem.metrics.timing import Phases
from tandem.train.evaluate import language_model_metrics, policy_metrics
from tandem.train.loop import StepLoop, rows_of
from tandem.train.ppo_trainer import PPOTrainer, num_updates
from tandem.train.reward_function import load_reward_function
from tandem.train.rows import StepRows
from tandem.train.run import Run, save_anywhere, save_policy, with_template
from tandem.types import Experience


def train_ppo(run: Run, rows: StepRows) -> None:
    """Train step 3 and leave `RUN/ppo/{actor,critic,ema}`, folders that from_pretrained opens."""
    config, ppo = run.config, run.config.ppo
    source = run.policy_source()
    prompts, heldout = rows.prompts, rows.heldout_prompts[: ppo.eval_prompts]
    if not prompts:
        raise DataError("step ppo must have at least one prompt; got none. See the drops above.")
    num_steps = ppo.steps or -(-len(prompts) // ppo.prompts_per_step)
    engine = RLHFEngine(
        actor=source,
        reward_model=_reward_source(run),
        config=config,
        num_updates=num_updates(config, num_steps),
        num_actor_updates=num_updates(config, max(1, num_steps - ppo.critic_warmup_steps)),
        world=run.world,
    )
    run.say(f"ppo: {engine.says()}")
    reward_function = load_reward_function(ppo.reward_function) if ppo.reward_function else None
    phases = Phases()
    trainer = PPOTrainer(
        engine, config, reward_function=reward_function, ptx_rows=rows.ptx, phases=phases
    )
    state = run.load("ppo")
    start = 0 if state is None else state.step

    def evaluate() -> dict[str, float]:
        with phases("evaluate"):
            metrics, _ = policy_metrics(engine, heldout, config, reward_function)
            if rows.heldout_ptx:
                forgetting = language_model_metrics(
                    engine.actor, rows.heldout_ptx, rows.renderer, config
                )
                metrics["heldout_ptx_perplexity"] = forgetting["heldout_perplexity"]
        return metrics

    order = BatchOrder(
        num_rows=len(prompts),
        batch_size=ppo.prompts_per_step,
        seed=config.seed,
        epochs=None,
        max_steps=num_steps,
    )
    evaluation: dict[str, float] = {}
    thresholds = {"ratio-gap": trainer.ratio_tolerance}
    with run.metric_log("ppo", num_steps, start, thresholds) as log:
        loop = StepLoop(run, "ppo", log, lambda step: _state(step, trainer, loop), phases)
        trainer.on_bad = lambda bad, answers: loop.skip(bad, rows_of(answers.batch))
        if state is not None:
            _restore(state, trainer, loop)
        if start == 0:
            evaluation = evaluate()
            log.log(0, {**evaluation, **phases.metrics()})
        with loop:
            for step, numbers in order.from_step(start):
                with phases("step"):
                    batch = [prompts[i] for i in numbers]
                    loop.begin(step, batch)
                    values: dict[str, float] = {}
                    try:
                        experience = trainer.generate_experience(batch, step=step)
                        values |= experience.metrics
                        values |= trainer.train_rlhf(experience, step=step)
                        _show_samples(log, step, experience, config.log.print_samples_every)
                    except BadStepError as bad:
                        loop.skip(bad)
                    if step == num_steps or (ppo.eval_every and step % ppo.eval_every == 0):
                        evaluation = evaluate()
                        values |= evaluation
                loop.end(values)
    engine.actor_trainee.settle()
    engine.critic_trainee.settle()
    facts = {**evaluation, "steps": num_steps}
    run.finish("ppo", lambda folder: _save(engine, rows, folder), facts)


def _reward_source(run: Run) -> str | None:
    if run.config.ppo.reward_model_weight == 0:
        return None
    source = run.reward_source()
    if source is None and not run.config.ppo.reward_function:
        raise ConfigError(
            "step ppo must have a reward: --reward-model or --ppo.reward-function; got neither, "
            f"and {run.path} has no finished reward step."
        )
    return source


def _show_samples(log: MetricLog | MutedLog, step: int, experience: Experience, every: int) -> None:
    """Show the first prompt's answers of a step, with their scores."""
    if every == 0 or step % every:
        return
    rollout = experience.rollout
    first = rollout.prompts[0]
    answers: dict[str, Answer] = {
        f"sample {i + 1}": {"text": rollout.responses[i], "score": float(experience.scores[i])}
        for i in range(len(rollout))
        if rollout.prompts[i] is first
    }
    log.sample(step, first.messages[-1].content, answers)


def _state(step: int, trainer: PPOTrainer, loop: StepLoop) -> State:
    engine = trainer.engine
    tensors: dict[str, Mapping[str, Any]] = {}
    for name, trainee in (("actor", engine.actor_trainee), ("critic", engine.critic_trainee)):
        tensors[name] = trainee.weights()
        tensors[f"{name}_optimizer"] = trainee.state_tensors()
    if engine.scaler is not None:
        tensors["scaler"] = engine.scaler.state_tensors()
    if engine.ema is not None:
        tensors["ema"] = engine.ema.state_tensors()
    return State(step, tensors, {"kl_coef": trainer.kl_coef, **loop.state_numbers()})


def _restore(state: State, trainer: PPOTrainer, loop: StepLoop) -> None:
    loop.restore(state.numbers)
    engine = trainer.engine
    for name, trainee in (("actor", engine.actor_trainee), ("critic", engine.critic_trainee)):
        trainee.load_weights(state.tensors[name])
        trainee.load_state_tensors(state.tensors[f"{name}_optimizer"])
    if engine.scaler is not None and "scaler" in state.tensors:
        engine.scaler.load_state_tensors(state.tensors["scaler"])
    if engine.ema is not None:
        engine.ema.load_state_tensors(state.tensors["ema"])
    trainer.kl_coef = float(state.numbers["kl_coef"])


def _save(engine: RLHFEngine, rows: StepRows, folder: Path) -> None:
    save_policy(engine.actor, rows, folder / "actor")
    tokenizer = with_template(engine.tokenizer, engine.renderer)
    save_anywhere(engine.critic, tokenizer, folder / "critic")
    if engine.ema is not None:
        with engine.ema.applied():
            save_policy(engine.actor, rows, folder / "ema")
