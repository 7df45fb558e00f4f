"""All stages of a run in order; finished ones are not repeated."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tandem.checkpoint.beside import verify_beside
from tandem.checkpoint.folder import MANIFEST
from tandem.checkpoint.sharing import described, find_folders
from tandem.config.load import check_config
from tandem.config.schema import RunConfig, rl_section
from tandem.config.scoring import weighted_models
from tandem.config.stages import (
    in_order,
    leaving,
    of_family,
    rl_stage,
    sources,
    stage_names,
    stage_of,
)
from tandem.data.ledger import USES, DatasetLedger
from tandem.data.unwritten import unwritten_lines
from tandem.devices import resolve_device
from tandem.engine.allocator import give_back_memory, keep_freed_memory
from tandem.engine.module_scorer import RewardModule
from tandem.engine.reference import require_same_tokens
from tandem.engine.shard_plan import zero_plus_plus
from tandem.errors import ConfigError
from tandem.garbage import no_collection_of_old_objects
from tandem.metrics.answers import ROWS_FILE
from tandem.metrics.sinks import missing_trackers
from tandem.models.checkpoint_ref import model_folders
from tandem.models.load import load_tokenizer
from tandem.models.source import locate, require_config, whole_model
from tandem.parallel.watchdog import note
from tandem.parallel.world import World, launched
from tandem.rewards.scoring import named
from tandem.text import counted, visible
from tandem.training.answer_records import shown_rows
from tandem.training.callbacks import Callback, CallbackStop, require_callbacks
from tandem.training.checks.agreement import require_one_configuration, unlike_ranks
from tandem.training.checks.conversation_trial import check_environment
from tandem.training.checks.disk_room import require_room
from tandem.training.checks.left_out import left_out_lines
from tandem.training.checks.model_checks import check_models, check_trained, notes_on_starts
from tandem.training.checks.planned_steps import planned_steps
from tandem.training.checks.policy_trial import check_pair_losses, check_policy_functions
from tandem.training.checks.preflight import (
    check_parallel,
    check_rows,
    decoders_alone,
    idle_ranks,
    rates_for_large_models,
)
from tandem.training.checks.trained_tokens import token_lines
from tandem.training.comparing.compare import compare, is_compared, policy_of_program
from tandem.training.forecast import Forecast
from tandem.training.given import GivenModel, Rows, digest_of_module, with_given
from tandem.training.own_templates import settle_template
from tandem.training.reward_function import check_rewards, columns_given
from tandem.training.reward_model import has_policy
from tandem.training.run_folder import Run
from tandem.training.run_report import report, report_at_a_stop
from tandem.training.saving import rounded_away
from tandem.training.shares import settle_shares
from tandem.training.stage_data import StepRows, positions, prepare_rows
from tandem.training.stage_loop import StageJob, run_stage


def train(
    config: RunConfig,
    *,
    data: Rows | Sequence[Rows] | None = None,
    actor_model: GivenModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reward_model: GivenModel | None = None,
    reward_tokenizer: PreTrainedTokenizerBase | None = None,
    callbacks: Sequence[Callback] = (),
    command: str = "",
    print_line: Callable[[str], None] = print,
    world: World | None = None,
) -> Run:
    """Run the configured stages in `config.output_dir`, then compare the models and report: the
    `tandem train` command. Finished stages are skipped, an unfinished one continues from its newest
    checkpoint.

    What is given in memory is written into `output_dir/given` first, so that the run can be
    continued, evaluated and repeated without it; the objects themselves are not changed. Given
    again, it must have the same content.

    Args:
        data: instead of `config.data`: a list of dicts, a `datasets.Dataset`, a name as in
            `--data`, or a list of these.
        actor_model: instead of `config.actor_model`: a transformers model with its tokenizer, a
            folder or a hub name.
        tokenizer: of models in memory.
        reward_model: instead of `config.reward_model`: the same, or any torch module, called as
            `module(token_ids, attention_mask)`, (B, T) int64 padded on the right, for (B,) scores.
            It stays in memory and must be given again to continue.
        reward_tokenizer: the reward model's, if it is another.
        callbacks: hear of rollouts, steps, evaluations and saves, and may stop the run.
        command: the command that repeats the run, for the report; by default with its config.yaml.
        print_line: shows a line to the user, on the first rank.
        world: the ranks that run this together. None: those that torchrun's environment names, or
            one process.
    Returns:
        the run, whose folder (`run.path`) holds everything; `run.stopped` says why a callback
        stopped it.
    Raises:
        ConfigError: the configuration is wrong; all complaints at once.
        CheckpointError: the folder is not a run's, or was made from something else.
        Stopped: on SIGINT, SIGTERM, SIGHUP or SIGUSR1; the running step is saved. A second signal
            ends the process.
    """
    check_config(config)
    keep_freed_memory()
    world = world or launched(config.parallel, resolve_device(config.device))
    require_one_configuration(config, world)
    world = find_folders(Path(config.output_dir), world)
    config, module = with_given(
        config,
        world,
        data=data,
        actor_model=actor_model,
        tokenizer=tokenizer,
        reward_model=reward_model,
        reward_tokenizer=reward_tokenizer,
    )
    config, said = settle_shares(config, world)
    config, of_template = settle_template(config, world)
    run = Run(config, print_line, world)
    run.callbacks = require_callbacks(callbacks)
    if module is not None:
        _score_by(run, module)
    again = _again(run)
    with run.stops, closing(run):
        try:
            _train(run, command or again, [line for line in (said, of_template) if line])
        except CallbackStop as stop:
            run.stopped = str(stop)
            run.print_line(f"stopped: {stop}. The same call continues; finished stages are kept.")
        finally:
            give_back_memory()  # what the program does next is not this run's
    return run


def _again(run: Run) -> str:
    """What repeats a run that a program began."""
    path = str(run.path / "config.yaml")
    if run.reward_module is None:
        return f"tandem train --config {shlex.quote(path)}"
    kind = type(run.reward_module.module).__name__
    return f"tandem.train(tandem.load_config({path!r}), reward_model=...)  # in Python, a {kind}"


def _score_by(run: Run, module: RewardModule) -> None:
    """Let a torch module reward the run's RL stage.

    Raises:
        ConfigError: a stage trains a reward model, or none is rewarded.
    """
    trains = leaving(run.config.stages, "reward model")
    if trains or not of_family(run.config.stages, "rl"):
        raise ConfigError(
            "reward_model= a torch module must go with an RL stage and no stage that trains a "
            f"reward model; got stages {', '.join(run.config.stages)}. Change stages, or give a "
            "transformers model."
        )
    run.reward_module = module
    run.identity.in_memory["the reward module"] = digest_of_module(module.module)


def _unfinished(run: Run) -> list[str]:
    """The run's stages that are still to come.

    Raises:
        CheckpointError: some stages in its folder were finished with other knobs or inputs, or a
            folder is damaged.
    """
    there = [stage for stage in stage_names() if (run.folder(stage) / MANIFEST).exists()]
    run.identity.require_all_same({stage: run.verify(stage)["made_from"] for stage in there})
    return [stage for stage in run.config.stages if stage not in there]


def _train(run: Run, command: str, settled: Sequence[str]) -> None:
    """`settled`: lines on what the run's folder has decided."""
    config, print_line = run.config, run.print_line
    if line := described(run.path, run.world):
        print_line(line)
    run.require_own_folder()
    run.bring_finished()
    unfinished = _unfinished(run)  # before anything is read: refuses stages made otherwise
    _check_inputs(run)
    check_models(run, unfinished, *tokenizer_sources(run))
    for line in settled:
        print_line(line)
    _, switched_off = zero_plus_plus(run.settings, run.world)
    if switched_off:
        print_line(f"ZeRO++: {switched_off}")
    print_line(f"reading {', '.join((*config.data, *config.sft_data, *config.eval_data))}")
    rows = prepare_rows(config, *tokenizer_sources(run), says=run.world.is_first)
    run.note_data(rows)
    room = positions(tokenizer_sources(run)[0], config)
    lines = ledger_lines(rows) + left_out_lines(config, rows.ledger, rows.lengths, room)
    for line in lines + unwritten_lines(rows.renderer, rows.ledger):
        print_line(line)
    if rows.spread:
        kinds = ", ".join(f"{few:,} of {of:,} {kind}" for kind, (few, of) in rows.spread.items())
        print_line(f"note: an evaluation reads {kinds} held out (--dataset.eval-rows; 0: all)")
    unfinished = _unfinished(run)
    if unfinished:
        check_parallel(config, run.world, tokenizer_sources(run)[0])
        check_rows(config, rows, *tokenizer_sources(run))
        check_trained(run, unfinished, rows, *tokenizer_sources(run))
        run.require_continuable(unfinished[0])
        check_pair_losses(config, unfinished, run.world)
        if of_family(unfinished, "rl"):
            rl = rl_section(config)
            section = rl_stage(config.stages).section
            check_policy_functions(rl, section, rows.prompts, config.sampling, run.world)
            columns = columns_given(config, rows).names
            check_environment(config, rows, columns, run.world, print_line)
            check_rewards(rl.reward_function, config, rows, run.world, print_line)
        to_come = replace(config, stages=tuple(unfinished))
        together = config.parallel.inference_tp_size
        for line in idle_ranks(to_come, run.world) + unlike_ranks(run.world, together):
            print_line(line)
        sources = tokenizer_sources(run)
        for line in decoders_alone(config, *sources) + rates_for_large_models(to_come, *sources):
            print_line(line)
        if run.world.is_first:
            for line in token_lines(to_come, rows.renderer, _start_of(run, unfinished[0])):
                print_line(line)
    run.identity.note_files()  # reads models whole, so what costs less is checked before
    run.world.barrier()  # no rank changes the folder before every rank has looked at it
    run.open(command)
    unfinished = _unfinished(run)  # another run may have had the folder until now
    run.write_json("data.json", json.loads(rows.ledger.to_json()))
    run.write_json(ROWS_FILE, shown_rows(rows))
    with report_at_a_stop(run), no_collection_of_old_objects():  # of libraries and rows
        _run_stages(run, rows, unfinished)
        if not is_compared(run):
            run.identity.files.require_unchanged()
            compare(run, rows)
    report(run)
    run.world.barrier()


def _start_of(run: Run, stage: str) -> str:
    """What a stage starts from."""
    return run.policy_source(stage) if has_policy(run) else tokenizer_sources(run)[0]


def _run_stages(run: Run, rows: StepRows, unfinished: Sequence[str]) -> None:
    """Every stage that is not finished, in order."""
    config, print_line = run.config, run.print_line
    for stage in config.stages:
        if stage not in unfinished:
            print_line(f"{stage}: finished before, in {run.folder(stage)}")
            continue
        start = time.monotonic()
        run.identity.files.require_unchanged()  # since earlier stages began
        print_line(f"{stage}: begins")
        note(stage)  # for the watchdog, while models load
        with no_collection_of_old_objects():  # the stage before leaves its models' memory
            give_back_memory()
            forecast = Forecast(run, stage, rows)
            require_room(run, stage, forecast.prediction)
            with forecast.loading():
                job = prepared(stage, run, rows)
            lines = [*notes_on_starts(config, stage_of(stage))]
            for line in (*lines, *planned_steps(stage_of(stage), job.order, rows)):
                print_line(line)
            run_stage(run, stage, forecast.compared_before_saving(job))
        del job  # its models make room for the next stage's
        saved = f"saved in {run.folder(stage)}{rounded_away(run.path, stage, config)}"
        print_line(f"{stage}: done in {time.monotonic() - start:.0f} s, {saved}")
        if config.parallel.frozen_weights:
            print_line(
                f"{stage}: serve that folder itself; its adapter was trained on "
                f"{config.parallel.frozen_weights} weights and is another policy on full ones"
            )
        run.stop_if_asked(f"after {stage}, which is finished")


def prepared(stage: str, run: Run, rows: StepRows) -> StageJob:
    """A stage, ready to run: calls the function that its record names."""
    return _function_of(stage)(run, rows)


def _function_of(stage: str) -> Callable[[Run, StepRows], StageJob]:
    module, _, name = stage_of(stage).prepare.partition(":")
    function: Callable[[Run, StepRows], StageJob] = getattr(import_module(module), name)
    return function


def ledger_lines(rows: StepRows) -> list[str]:
    """One line per data set: rows read, used per stage, unused and dropped by reason."""
    lines = []
    for account in rows.ledger.datasets.values():
        used = ", ".join(f"{s} {account.used[s]}" for s in USES if account.used[s])
        read = counted(account.rows, "row")
        line = f"data {account.name}: {read} = used {account.num_used}{f' ({used})' * bool(used)}"
        for what, reasons in (
            ("unused", dict(account.unused)),
            ("dropped", {reason: d.count for reason, d in account.dropped.items()}),
        ):
            if reasons:
                detail = "; ".join(f"{reason}: {count}" for reason, count in reasons.items())
                line += f" + {what} {sum(reasons.values())} ({detail})"
        if account.notes:
            line += f"; noted: {'; '.join(_noted(account, note) for note in account.notes)}"
        lines.append(line)
    return lines


def _noted(account: DatasetLedger, note: str) -> str:
    """A note with the rows that it is on, and where the first one is."""
    places = account.noted_at.get(note, ())
    first = f" (the first: {visible(places[0])})" if places else ""
    return f"{note}: {account.notes[note]}{first}"


def _check_inputs(run: Run) -> None:
    """Report missing inputs before anything is loaded."""
    config = run.config
    resolve_device(config.device)
    for stage in config.stages:
        _function_of(stage)  # an import error must not cost the stages before it
    log = config.log
    missing = missing_trackers(tensorboard=log.tensorboard, wandb=log.wandb)
    # The first rank alone writes to them.
    problems = [line.rstrip(".") for line in run.world.all_gather_object(missing)[0]]
    stages = in_order(config.stages)
    only_scores = all(stage.leaves == "reward model" for stage in stages)
    if not has_policy(run) and not (only_scores and config.reward_model):
        problems.append(
            "actor_model must name a model (a folder or hub name); got nothing. Give --actor-model"
        )
    reads_texts = all("sft_data" in stage.data for stage in stages)
    if not config.data and not (config.sft_data and reads_texts):
        problems.append("data must name at least one data set; got nothing. Give --data FILE")
    rl = [stage for stage in of_family(config.stages, "rl") if stage.rewarded]
    scores = leaving(config.stages, "reward model")
    function = rl_section(config).reward_function
    has_source = run.reward_module is not None or run.reward_source(rl[0].name) if rl else False
    if rl and not (scores or function or has_source):
        makers = " or ".join(stage.name for stage in sources("reward model", rl[0].name))
        problems.append(
            f"stage {rl[0].name} must have a reward; got none. Add stage {makers}, --reward-model "
            f"or --{rl[0].section}.reward-function"
        )
    further = [model.source for model in weighted_models(config.scoring.reward_models)]
    if rl and further and not (scores or has_source):
        problems.append(
            "scoring.reward_models must be empty without a reward model, beside which they count; "
            f"got {further[0]}. Give it as --reward-model"
        )
    if problems:
        raise ConfigError(". ".join(problems))
    given = (config.actor_model, config.reward_model, config.reference_model, config.critic_model)
    named_models = (*given, *further)
    for model in filter(None, named_models):
        require_config(whole_model(locate(model)))
    if rl and function:
        named(function)  # a typo must not cost two stages
    if rl:
        for model in further:
            load_tokenizer(model, trust_remote_code=config.trust_remote_code)
    like = {"reference model": config.reference_model, "critic model": config.critic_model}
    code = config.trust_remote_code
    for role, model in like.items():
        if model:
            own = load_tokenizer(tokenizer_sources(run)[0], trust_remote_code=code)
            require_same_tokens(model, own, role=role, trust_remote_code=code)
    for model in dict.fromkeys(named_models):
        for folder in model_folders(model) if model else ():
            verify_beside(folder, world=run.world)


def tokenizer_sources(run: Run) -> tuple[str, str]:
    """The models whose tokenizers policy and reward model use, before any stage has run."""
    policy = run.config.actor_model or run.trained("policy") or policy_of_program(run)
    if not policy:  # the reward model's stage alone: its own tokenizer
        return run.config.reward_model, run.judge or run.config.reward_model
    reward = run.config.reward_model
    if not leaving(run.config.stages, "reward model"):  # an earlier stage may have trained it
        reward = run.trained("reward model") or reward
    return policy, run.judge or reward or policy
