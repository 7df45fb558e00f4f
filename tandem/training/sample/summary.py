"""The last lines of `tandem sample`."""

from __future__ import annotations

import shlex
from pathlib import Path

from tandem.config.dataset import DataConfig
from tandem.config.stages import STAGES
from tandem.data.chat.own_template import KEPT
from tandem.text import counted, visible
from tandem.training.sample.file import Progress
from tandem.training.sample.flags import SampleSettings
from tandem.training.sample.rows import BLANK, CUT_OFF, EQUAL


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
        lines.append(_rewards(progress))
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
        lines += _what_helps(settings, progress)
    command = _learns_from(write)
    if command and progress.rows:
        words = ["tandem", command, "--actor-model", config.actor_model, "--data", output]
        if (own := config.dataset.own_template) and not _is_kept(own, config.actor_model):
            words += ["--chat-template", own]
        if progress.longest > DataConfig().max_tokens:
            words += ["--max-tokens", str(progress.longest)]
        lines.append(f"next: {shlex.join(words)}")
    return lines


def _rewards(progress: Progress) -> str:
    """Mean rewards; where some answers may not be chosen, of those that may too."""
    line = f"reward: mean {progress.rewards / progress.scored:.4g}"
    best = f"{progress.best / progress.num_best:.4g}" if progress.num_best else ""
    if best and progress.scored in (progress.num_among, 0):
        return f"{line}, of each prompt's best answer {best}"
    if not best or not progress.num_among:  # the latter: of a file that an older version began
        return f"{line} over all answers" + f"; best of the finished ones {best}" * bool(best)
    whole = f"{line} over all {progress.scored:,} answers with a reward"
    mean = f"{progress.among / progress.num_among:.4g}"
    return f"{whole}; over the {progress.num_among:,} to choose from {mean}, over the best {best}"


_SHARE_TO_ADVISE = 0.5
"""Of prompts left out for one reason, from which on it is told what helps."""


def _what_helps(settings: SampleSettings, progress: Progress) -> list[str]:
    """Flags that leave fewer prompts out, where many are, for the most frequent reason."""
    reason, count = max(progress.left.items(), key=lambda item: item[1])
    if progress.rows and count < _SHARE_TO_ADVISE * progress.prompts:
        return []
    sampling = settings.config.sampling
    more = f"--samples-per-prompt {max(4, 2 * sampling.samples_per_prompt)}"
    if reason == CUT_OFF:
        longer = f"--max-new-tokens {2 * sampling.max_new_tokens}"
        advice = f"give answers more room ({longer}), or keep cut-off ones too (--keep-cut-off)"
    elif reason.startswith("best reward below"):
        advice = f"lower --min-reward, or sample more answers ({more})"
    elif reason.startswith("rewards less than"):
        advice = f"lower --min-margin, or sample more answers ({more})"
    elif reason == EQUAL or "best and worst" in reason:
        advice = f"sample more answers ({more}) at a higher --temperature, or by a finer reward"
    elif reason == BLANK:
        advice = "look at the answers by --write all; raise --temperature, or train the model on"
    elif "alone" in reason:
        advice = f"sample more answers ({more})"
    else:
        advice = "see what the reward function returns, by --write all"
    again = ", and remove the file to make it anew" if progress.rows else ""
    return [f"note: to leave fewer prompts out, {advice}{again}"]


def _is_kept(template: str, model: str) -> bool:
    """Whether a template is the copy in a run's folder, and the model was saved with it."""
    run = Path(template).parent
    return Path(template).name == KEPT and run != Path() and run in Path(model).parents


def _learns_from(write: str) -> str:
    """The command that trains a policy on such rows; "" if none does on all of them."""
    share = {"best": "texts", "pairs": "pairs"}.get(write)
    found = (s.name for s in STAGES if (s.share, s.leaves, s.labelled) == (share, "policy", False))
    return next(found, "")
