"""What a stage is, and which ones exist: one record each, read by everything that lists stages.

The command line, the checks before a run, its folder, the rows, the comparison of models, chat,
report, sweep and memory plan read here what they need to know about a stage; what the stage does
is in the one file that `prepare` names. docs/add_an_algorithm.md adds one.

No torch here: help must be instant. The functions read `STAGES` when they are called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tandem.errors import ConfigError

Family = Literal["supervised", "pairs", "rl"]
FAMILIES: tuple[Family, ...] = get_args(Family)
Share = Literal["texts", "pairs", "prompts"]
Leaves = Literal["policy", "reward model"]


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy that a stage produces. label: its name in chat and comparisons. folder: below the
    stage's (empty: that folder itself)."""

    label: str
    folder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a run.

    name: its command, its folder in the run, its name in every record.
    title, short: its names in prose; "SFT model" is the model that it makes.
    help: its line in `tandem --help`.
    prepare: "module:function" that makes its StageJob (training/stage_loop.py) from the run and its
        rows; imported when it runs.
    family: what it learns from: supervised (texts), pairs, rl (its own answers and their reward).
        Stages of a family share knobs, metrics, alarms and the formula of their memory.
    share: the share of the data that it trains on (data/split.py).
    section: its section of RunConfig, which several stages may share. Empty: the stage's name.
    knobs: other knobs and sections that its result depends on, by dotted name.
    data: the knobs that name its data sets.
    after: earlier stages that it starts from; of several policies, the first that is finished.
    excludes: stages that cannot be in the same run.
    leaves: what it produces. A reward model is not a policy and scores with its own tokenizer.
    policies: what chat and comparison find in its folder, the preferred one first. By default the
        folder itself, under the stage's name.
    trains: roles whose ZeRO stage applies to it (parallel.ROLE_zero_stage).
    freezes: frozen models that it also needs, by their names in parallel.offload.
    unread: knobs and groups of its section that it does not read; setting one is refused.
    labelled: it trains on single answers labelled good or bad, and splits pairs into two of them.
    rewarded: of the RL family: it learns from rewards; else from a teacher's distributions alone.
    compares_answers: it learns from the better and the worse of its own answers to a prompt.
    headline: the metric that sums up its result.
    measure: the held-out metric by which keep_best and patience compare its evaluations; its
        declaration (metrics/table.py) says which direction is better.
    defaults: other defaults of shared knobs, by dotted name, in a run with this stage.
    taught: a learning rate that has taught a model of 135 million weights (docs/real_runs.md), of
        its section or of the section's actor; 0 if none is known.
    """

    name: str
    title: str
    short: str
    help: str
    prepare: str
    family: Family
    share: Share
    section: str = ""
    knobs: tuple[str, ...] = ()
    data: tuple[str, ...] = ("data",)
    after: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    leaves: Leaves = "policy"
    policies: tuple[Policy, ...] = ()
    trains: tuple[Literal["actor", "critic"], ...] = ("actor",)
    freezes: tuple[Literal["reference", "reward"], ...] = ()
    unread: tuple[str, ...] = ()
    labelled: bool = False
    rewarded: bool = True
    compares_answers: bool = False
    headline: str = "loss"
    measure: str = "heldout_loss"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    taught: float = 0.0

    def __post_init__(self) -> None:
        if not self.section:
            object.__setattr__(self, "section", self.name)
        if not self.policies and self.leaves == "policy":
            object.__setattr__(self, "policies", (Policy(self.name),))

    @property
    def given(self) -> str:
        """The knob that names a model to use instead of what this stage produces."""
        return "actor_model" if self.leaves == "policy" else "reward_model"

    @property
    def model_folder(self) -> str:
        """Where its model is, below the run's folder."""
        return self.folder_of(self.policies[0]) if self.policies else self.name

    def folder_of(self, policy: Policy) -> str:
        """Where one of its policies is, below the run's folder."""
        return f"{self.name}/{policy.folder}" if policy.folder else self.name

    @property
    def commons(self) -> frozenset[str]:
        """What a knob's `common` may say to be on its help page."""
        return frozenset({self.family, *self.trains, *([] if self.rewarded else ["teacher"])})

    @property
    def has_critic(self) -> bool:
        """Whether it trains a critic beside the policy."""
        return self.trains == ("actor", "critic")

    def reads(self, knob: str) -> bool:
        """Whether a knob, by its dotted name, is in its section (but not in `unread`), in none, or
        one of `knobs`."""
        section, _, name = knob.partition(".")
        if section == self.section:
            return name.split(".")[0] not in self.unread
        return section not in sections() or knob in self.knobs


_OF_CRITIC = ("critic", "critic_warmup_steps", "value_clip")
"""Knobs and groups of a stage's section that speak of its critic."""

STAGES: tuple[Stage, ...] = (
    Stage(
        name="sft",
        title="Supervised fine-tuning",
        short="SFT",
        help="Stage 1 alone: supervised fine-tuning of --actor-model.",
        prepare="tandem.training.sft:prepare",
        family="supervised",
        share="texts",
        knobs=("actor_model", "sft_data"),
        data=("data", "sft_data"),
        taught=1e-4,
    ),
    Stage(
        name="reward",
        title="Reward model",
        short="Reward",
        help="Stage 2 alone: a reward model from --reward-model (or --actor-model).",
        prepare="tandem.training.reward_model:prepare",
        family="pairs",
        share="pairs",
        knobs=("reward_model", "sampling"),
        after=("sft",),
        leaves="reward model",
        trains=("critic",),
        taught=5e-5,
    ),
    Stage(
        name="dpo",
        title="Direct preference optimization",
        short="DPO",
        help="Direct preference optimization of --actor-model, in place of stages 2 and 3.",
        prepare="tandem.training.dpo:prepare",
        family="pairs",
        share="pairs",
        knobs=("reference_model", "reference"),
        after=("sft",),
        excludes=("ppo", "grpo"),
        freezes=("reference",),
    ),
    Stage(
        name="ppo",
        title="PPO",
        short="PPO",
        help="Stage 3 alone: PPO of --actor-model against --reward-model or --reward-function.",
        prepare="tandem.training.ppo:prepare",
        family="rl",
        share="prompts",
        knobs=(
            *("reference_model", "reference", "critic_model", "sampling", "scoring"),
            "hybrid_engine",
        ),
        data=("data", "ptx_data"),
        after=("sft", "reward"),
        policies=(Policy("ppo", "actor"), Policy("ema", "ema")),
        trains=("actor", "critic"),
        freezes=("reference", "reward"),
        headline="reward",
        measure="heldout_reward",
        taught=3e-6,
    ),
    Stage(
        name="grpo",
        title="GRPO",
        short="GRPO",
        help="Policy gradients without a critic, of --actor-model: GRPO, RLOO, DAPO (--algorithm).",
        prepare="tandem.training.grpo:prepare",
        family="rl",
        share="prompts",
        knobs=("reference_model", "reference", "sampling", "scoring", "hybrid_engine"),
        data=("data", "ptx_data"),
        after=("sft", "reward"),
        excludes=("ppo",),
        policies=(Policy("grpo", "actor"), Policy("grpo-ema", "ema")),
        freezes=("reference", "reward"),
        headline="reward",
        measure="heldout_reward",
        defaults={"sampling.samples_per_prompt": 8},
        taught=3e-6,
    ),
    Stage(
        name="distill",
        title="On-policy distillation",
        short="Distillation",
        help="Distillation: --actor-model answers prompts and learns a teacher's distributions.",
        prepare="tandem.training.distill:prepare",
        family="rl",
        share="prompts",
        section="grpo",
        knobs=("reference_model", "sampling", "hybrid_engine"),
        data=("data", "ptx_data"),
        after=("sft",),
        excludes=("dpo", "kto", "ppo", "grpo", "online-dpo"),
        policies=(Policy("distill", "actor"), Policy("distill-ema", "ema")),
        freezes=("reference",),
        unread=(
            *("algorithm", "baseline", "advantage_scale", "loss", "clip_low", "clip_high"),
            *("dual_clip", "cispo_max_ratio", "overlong_penalty", "overlong_buffer"),
            *("sampling_rounds", "kl_coef", "kl_coef_target", "kl_horizon", "entropy_coef"),
            *("reward_clip", "missing_eos_penalty", "reward_model_weight", "reward_function"),
            *("reward_function_weight", "loss_function", "advantage_function"),
        ),
        rewarded=False,
        headline="kl_loss",
        measure="heldout_divergence",
        defaults={
            "grpo.baseline": "none",
            "grpo.advantage_scale": "none",
            "grpo.kl": "exact-in-loss",
            "grpo.kl_coef": 1.0,
        },
    ),
    Stage(
        name="kto",
        title="Kahneman-Tversky optimization",
        short="KTO",
        help="KTO of --actor-model on answers labelled good or bad; no reward model.",
        prepare="tandem.training.kto:prepare",
        family="pairs",
        share="pairs",
        knobs=("reference_model", "reference"),
        after=("sft",),
        excludes=("dpo", "ppo", "grpo"),
        freezes=("reference",),
        labelled=True,
    ),
    Stage(
        name="online-dpo",
        title="Online DPO",
        short="Online DPO",
        help="DPO of --actor-model on its own answers, which --reward-model or "
        "--reward-function ranks.",
        prepare="tandem.training.online_dpo:prepare",
        family="rl",
        share="prompts",
        section="ppo",
        knobs=(
            *("reference_model", "reference", "sampling", "scoring", "hybrid_engine"),
            *("dpo.loss", "dpo.beta", "dpo.label_smoothing"),
            *("dpo.simpo_gamma", "dpo.ipo_logprobs", "dpo.sft_coef"),
            "dpo.loss_function",
        ),
        after=("sft", "reward"),
        excludes=("dpo", "kto", "ppo", "grpo"),
        policies=(Policy("online-dpo", "actor"), Policy("online-dpo-ema", "ema")),
        freezes=("reference", "reward"),
        unread=(
            *(*_OF_CRITIC, "gamma", "lam", "whiten_advantages"),
            *("kl_coef", "kl_in", "kl_coef_target", "kl_horizon", "clip_ratio", "entropy_coef"),
            *("early_stop_kl", "ratio_tolerance", "ptx_data", "ptx_coef", "ptx_batch_size"),
            *("loss_function", "advantage_function"),
            *("environment", "tools", "max_turns", "max_conversation_tokens"),
        ),
        compares_answers=True,
        headline="reward",
        measure="heldout_reward",
        defaults={"sampling.samples_per_prompt": 2},
    ),
)
"""In the order in which they run."""

DEFAULT = ("sft", "reward", "ppo")
"""What `tandem train` runs by default."""


def is_of_critic(knob: str) -> bool:
    """Whether a knob, by its dotted name, speaks of a critic beside the policy."""
    section, _, name = knob.partition(".")
    return any(
        stage.has_critic and stage.section == section and name.split(".")[0] in _OF_CRITIC
        for stage in STAGES
    )


def stage_names() -> tuple[str, ...]:
    """The names of all stages, in their order."""
    return tuple(stage.name for stage in STAGES)


def stage_of(name: str) -> Stage:
    """The stage of that name.

    Raises:
        ConfigError: there is none.
    """
    for stage in STAGES:
        if stage.name == name:
            return stage
    raise ConfigError(f"stage must be one of {', '.join(stage_names())}; got {name!r}. Use one.")


def in_order(names: Iterable[str]) -> list[Stage]:
    """The stages of these names, in the order in which they run."""
    wanted = set(names)
    return [stage for stage in STAGES if stage.name in wanted]


def of_family(names: Iterable[str], *families: Family) -> list[Stage]:
    """The named stages that are of these families, in order."""
    return [stage for stage in in_order(names) if stage.family in families]


def defaults_of(names: Iterable[str]) -> dict[str, Any]:
    """The other defaults of shared knobs, by dotted name, in a run of the named stages."""
    return {knob: value for stage in in_order(names) for knob, value in stage.defaults.items()}


def rl_stage(names: Iterable[str]) -> Stage:
    """The named stage that is of the RL family, or the first RL stage if none is."""
    return (of_family(names, "rl") or of_family(stage_names(), "rl"))[0]


def leaving(names: Iterable[str], what: Leaves) -> list[Stage]:
    """The named stages that produce that, in order."""
    return [stage for stage in in_order(names) if stage.leaves == what]


def sections() -> frozenset[str]:
    """The sections of RunConfig that belong to stages."""
    return frozenset(stage.section for stage in STAGES)


def are_apart(one: Stage, other: Stage) -> bool:
    """Whether two stages cannot be in the same run."""
    return one.name in other.excludes or other.name in one.excludes


def sources(what: Leaves, stage: str = "") -> list[Stage]:
    """The stages from whose policy or reward model `stage` starts, preferred first.

    Args:
        stage: empty: any, the stages in their order.
    """
    if stage:
        found = [stage_of(name) for name in stage_of(stage).after]
    else:
        found = in_order(name for later in STAGES for name in later.after)
    return [earlier for earlier in found if earlier.leaves == what]


def ways() -> list[list[str]]:
    """The sequences of stages that end in one that no other starts from, such as `sft reward
    ppo`."""
    taken = {name for stage in STAGES for name in stage.after}
    return [_way_to(stage) for stage in STAGES if stage.name not in taken]


def _way_to(stage: Stage) -> list[str]:
    names = {stage.name, *(name for before in stage.after for name in _way_to(stage_of(before)))}
    return [passed.name for passed in in_order(names)]


def policy_folders() -> dict[str, str]:
    """Every policy's folder below the run's by its label, in the order in which they are made."""
    return {policy.label: stage.folder_of(policy) for stage in STAGES for policy in stage.policies}


def latest_first() -> list[str]:
    """The labels of policies: each stage's main one, the last stage's first; then the others."""
    main = [stage.policies[0].label for stage in reversed(STAGES) if stage.policies]
    return [*main, *(label for label in policy_folders() if label not in main)]
