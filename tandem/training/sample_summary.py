"""The last lines of `tandem sample`."""

from __future__ import annotations

import shlex
from pathlib import Path

from tandem.config.dataset import DataConfig
from tandem.config.stages import STAGES
from tandem.data.own_template import KEPT
from tandem.text import counted, visible
from tandem.training.sample_file import Progress
from tandem.training.sample_flags import SampleSettings


def summary(settings: SampleSettings, progress: Progress) -> list[str]:
    """What was written, what was not and why, and the command that trains on it."""
    config, write = settings.config, settings.choice.write
    output = str(settings.output)
    speed = f" ({progress.tokens / progress.seconds:,.0f} tokens/s)" if progress.seconds else ""
    made = [
        counted(number, noun)
        for number, noun in (
            (progress.prompts, "prompt"),
            (progress.answers, "answer"),
            (progress.tokens, "token"),
        )
    ]
    lines = [f"{visible(output)}: {counted(progress.rows, 'row')} of {', '.join(made)}{speed}"]
    if progress.scored:
        line = f"reward: mean {progress.rewards / progress.scored:.4g}"
        if progress.num_best:
            line += f", of the best answers {progress.best / progress.num_best:.4g}"
        lines.append(line)
    counts = {
        f"cut off by --max-new-tokens {config.sampling.max_new_tokens}": progress.cut_off,
        "blank": progress.blank,
        "without a reward": progress.unscored,
    }
    if told := [f"{count:,} {what}" for what, count in counts.items() if count]:
        lines.append(f"answers: {', '.join(told)}")
    if progress.left:
        reasons = "; ".join(f"{reason}: {count:,}" for reason, count in progress.left.items())
        lines.append(f"left out: {counted(sum(progress.left.values()), 'prompt')} ({reasons})")
    command = _learns_from(write)
    if command and progress.rows:
        words = ["tandem", command, "--actor-model", config.actor_model, "--data", output]
        if (own := config.dataset.own_template) and not _is_kept(own, config.actor_model):
            words += ["--chat-template", own]
        if progress.longest > DataConfig().max_tokens:
            words += ["--max-tokens", str(progress.longest)]
        lines.append(f"next: {shlex.join(words)}")
    return lines


def _is_kept(template: str, model: str) -> bool:
    """Whether a template is the copy in a run's folder, and the model was saved with it."""
    run = Path(template).parent
    return Path(template).name == KEPT and run != Path() and run in Path(model).parents


def _learns_from(write: str) -> str:
    """The command that trains a policy on such rows; "" if none does on all of them."""
    share = {"best": "texts", "pairs": "pairs"}.get(write)
    found = (s.name for s in STAGES if (s.share, s.leaves, s.labelled) == (share, "policy", False))
    return next(found, "")
