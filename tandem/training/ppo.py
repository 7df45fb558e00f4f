"""Step 3: PPO against a reward model, a reward function or both.

A step is one rollout and its updates. Departures from DeepSpeed-Chat: answers are sampled, EOS is
a trained token, advantages are whitened, several epochs and minibatches work, every coefficient
is a knob, and the ratio before the first update is measured and must be 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.checkpoint.state import SavedState, State
from tandem.config.schema import num_updates
from tandem.data.loader import BatchOrder
from tandem.engine.hybrid import RLHFEngine
from tandem.errors import BadStepError, ConfigError, DataError
from tandem.metrics.log import Answer, MetricLog, MutedLog
from tandem.training.evaluate import language_model_metrics, policy_metrics
from tandem.training.loop import StepLoop
from tandem.training.ppo_trainer import PPOTrainer
from tandem.training.recorder import rows_of
from tandem.training.reward_function import load_reward_function
from tandem.training.rows import StepRows
from tandem.training.run import Run
from tandem.training.saving import save_anywhere, save_policy, with_template
from tandem.types import Experience


def train_ppo(run: Run, rows: StepRows) -> None:
    """Train step 3 and leave `RUN/ppo/{actor,critic,ema}`, folders that from_pretrained opens.

    Raises:
        DataError: there is no prompt.
        ConfigError: there is nothing to reward with.
        NumericsError: too many steps in a row brought numbers that are not sound.
        Stopped: a signal asked for it.
    """
    config, ppo, prompts = run.config, run.config.ppo, rows.prompts
    if not prompts:
        raise DataError("step ppo must have at least one prompt; got none. See the drops above.")
    num_steps = ppo.steps or -(-len(prompts) // ppo.prompts_per_step)
    trainer = _trainer(run, rows, num_steps)
    engine, phases = trainer.engine, trainer.phases
    state = run.load("ppo")
    start = 0 if state is None else state.step
    order = BatchOrder(
        num_rows=len(prompts),
        batch_size=ppo.prompts_per_step,
        seed=config.seed,
        epochs=None,
        max_steps=num_steps,
    )
    thresholds = {"ratio-gap": trainer.ratio_tolerance}
    with run.metric_log("ppo", num_steps, start, thresholds) as log:
        loop = StepLoop(
            run,
            "ppo",
            log,
            lambda: _evaluated(trainer, rows),
            lambda step: _state(step, trainer, loop),
            phases,
        )
        trainer.on_bad = lambda bad, answers: loop.skip(bad, rows_of(answers.batch))
        if state is not None:
            _restore(state, trainer, loop)
        else:
            loop.measure_start()
        with loop:
            if start < num_steps:
                trainer.rehearse(prompts)
            for step, numbers in order.from_step(start):
                with phases("step"):
                    batch = [prompts[i] for i in numbers]
                    loop.begin(step, batch)
                    values: dict[str, float] = {}
                    try:
                        experience = trainer.generate_experience(batch, step=step)
                        loop.made(experience)
                        values |= experience.metrics
                        values |= trainer.train_rlhf(experience, step=step)
                        _show_samples(log, step, experience, config.log.print_samples_every)
                    except BadStepError as bad:
                        loop.skip(bad)
                    if step == num_steps or (ppo.eval_every and step % ppo.eval_every == 0):
                        values |= loop.measure()
                loop.end(values)
    facts = {**loop.evaluation, "steps": num_steps}
    run.finish("ppo", lambda folder: _save(engine, rows, folder), facts)


def _trainer(run: Run, rows: StepRows, num_steps: int) -> PPOTrainer:
    """The engine with its roles loaded, and what trains it."""
    config, ppo = run.config, run.config.ppo
    engine = RLHFEngine(
        actor=run.policy_source(),
        reward_model=_reward_source(run),
        config=config,
        num_updates=num_updates(config, num_steps),
        num_actor_updates=num_updates(config, max(1, num_steps - ppo.critic_warmup_steps)),
        world=run.world,
    )
    run.say(f"ppo: {engine.says()}")
    function = load_reward_function(ppo.reward_function) if ppo.reward_function else None
    if function is not None and ppo.reward_clip:
        run.say(
            f"ppo: scores beyond +-{ppo.reward_clip:g} are clipped, {ppo.reward_function}'s too "
            "(--ppo.reward-clip 0: none)"
        )
    return PPOTrainer(engine, config, reward_function=function, ptx_rows=rows.ptx, say=run.say)


def _evaluated(trainer: PPOTrainer, rows: StepRows) -> dict[str, float]:
    """Scores of answers to held-out prompts, and what was forgotten of the ptx texts."""
    engine, config = trainer.engine, trainer.config
    heldout = rows.heldout_prompts[: config.ppo.eval_prompts]
    metrics, _ = policy_metrics(engine, heldout, config, trainer.reward_function)
    if rows.heldout_ptx:
        forgetting = language_model_metrics(engine.actor, rows.heldout_ptx, rows.renderer, config)
        metrics["heldout_ptx_perplexity"] = forgetting["heldout_perplexity"]
    return metrics


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


def _restore(state: SavedState, trainer: PPOTrainer, loop: StepLoop) -> None:
    loop.restore(state.numbers)
    engine = trainer.engine
    for name, trainee in (("actor", engine.actor_trainee), ("critic", engine.critic_trainee)):
        trainee.load_weights(state.tensors[name])
        trainee.load_state_tensors(state.tensors[f"{name}_optimizer"])
    if engine.scaler is not None and "scaler" in state.tensors:
        engine.scaler.load_state_tensors(state.tensors["scaler"].whole())
    if engine.ema is not None:
        engine.ema.load_state_tensors(state.tensors["ema"])
    trainer.kl_coef = float(state.numbers["kl_coef"])


def _save(engine: RLHFEngine, rows: StepRows, folder: Path) -> None:
    actor, critic, dtype = engine.actor_trainee, engine.critic_trainee, engine.config.save_dtype
    save_policy(engine.actor, rows, folder / "actor", actor.masters, dtype)
    tokenizer = with_template(engine.tokenizer, engine.renderer)
    save_anywhere(engine.critic, tokenizer, folder / "critic", critic.masters, dtype)
    if engine.ema is not None:
        with engine.ema.exact():
            save_policy(engine.actor, rows, folder / "ema", save_dtype=dtype)
