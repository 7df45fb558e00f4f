"""How rows become what each stage trains on."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import Literal

from tandem.config.knob import RL, SUPERVISED, at_home, knob
from tandem.errors import ConfigError

TOKENIZERS_OWN = "tokenizer"
"""The value of `chat_template` that leaves a tokenizer its own."""
CONTROL = "control"
"""What `lora.train_tokens` calls the control tokens of the chat template."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How rows become what each stage trains on."""

    split: tuple[float, ...] = knob((), common=True)
    """Shares of the prompts for SFT, reward model and PPO (DPO and KTO use the reward model's
    share, the other RL stages PPO's), kept for stages that run later too. Empty: 2,4,4
    (DeepSpeed-Chat's) among the stages that run, so a single stage gets everything; in a folder
    whose stages already have shares, those."""
    heldout: float = knob(0.05, ge=0, lt=1)
    """Share of the prompts that no stage trains on, for evaluation."""
    eval_rows: int = knob(1024, ge=0)
    """Most held-out rows of a kind (texts, pairs, labelled or graded answers) that an evaluation
    reads, spread evenly over each data set's; 0: all. RL's prompts have eval_prompts."""
    columns: tuple[str, ...] = knob(())
    """Column map for files of other shapes, as `role=column` (roles: prompt, chosen, rejected,
    completion, messages, text, system, tools, label, grade, margin, ranking, answers, ranks,
    scores, answer_a, answer_b, preferred). A map after a data set's name, as in
    `file.jsonl::prompt=question,completion=answer`, applies to that set only."""
    min_grade: str = knob("auto")
    """Lowest grade of a graded answer that SFT and mixture training imitate: a number, `mean` (that
    of the data set's grades) or `none` (any). Others are counted as unused there. auto: mean in a
    run that trains a reward model, else none."""
    on_bad_row: Literal["error", "drop"] = knob("error", common=True)
    """A row that cannot be used: stop with its file and line, or drop it and count it by reason."""
    max_tokens: int = knob(512, ge=8, common=("train", *SUPERVISED))
    """Longest sequence (prompt and answer) in SFT, reward model, DPO and KTO, in tokens."""
    max_prompt_tokens: int = knob(256, ge=1, common=RL)
    """Longest prompt in the RL stages (PPO, GRPO, distillation, online DPO), in tokens."""
    on_long_row: Literal["drop", "truncate", "error"] = knob("drop")
    """A row over the limit: drop it (counted), truncate the end of its answer or the oldest turns
    of its prompt (counted; a row that would lose its whole answer is dropped), or stop."""
    system_prompt: str = knob("")
    """Added to every conversation that has no system turn."""
    inline_speakers: bool = knob(False)
    """Read a prompt such as `Human: hi Assistant:`, whose turns no blank line parts (as in
    DeepSpeed-Chat's own files), as the conversation that it shows, for a chat template to frame.
    Off: it is one turn of the user's, and noted."""
    chat_template: str = knob(TOKENIZERS_OWN, common=SUPERVISED, path=True)
    """Chat template of every model, saved with it: `tokenizer` (the tokenizer's own, or the default
    if it has none), a Jinja file, a folder with one, `default` (Human: and Assistant:), `chatml` or
    `none` (prompt and answer, with nothing around them); with a variable set behind it as
    `tokenizer?enable_thinking=false` (docs/data.md)."""

    @property
    def own_template(self) -> str:
        """The template in place of the tokenizers' own; "" for theirs."""
        return "" if self.chat_template == TOKENIZERS_OWN else self.chat_template

    def lowest_imitated(self, *, scores: bool) -> float | None:
        """`min_grade` as a number; None: the mean of each data set.

        Args:
            scores: whether the run trains a reward model.
        Raises:
            ConfigError: it is neither a number nor one of the words.
        """
        words = {"mean": None, "none": -inf, "auto": None if scores else -inf}
        if self.min_grade in words:
            return words[self.min_grade]
        try:
            value = float(self.min_grade)
        except ValueError:
            value = nan
        if not isfinite(value):
            raise ConfigError(
                "dataset.min_grade must be a number, mean, none or auto; got "
                f"{self.min_grade!r}. Write for example 4."
            )
        return value

    def __post_init__(self) -> None:
        if not self.chat_template:
            object.__setattr__(self, "chat_template", TOKENIZERS_OWN)
        at_home(self)
