"""The embedded default: a data set, a tokenizer and a model that need no file and no network.

Short instructions of ten kinds, each with a preferred and a rejected answer, written by a seeded
generator. A hidden rule, which training never sees, judges any answer, so that the three stages can
be measured by something other than the reward model that they train.

    rows             the data set (its words and phrases: world.yaml)
    judge            the hidden rule
    build_tokenizer  a byte-level BPE tokenizer with a chat template
    model_config     a small Llama
    demo_config      the knobs of a run on two cores (demo.yaml)
"""

from pathlib import Path

from tandem.config.load import build_config
from tandem.config.schema import RunConfig
from tandem.data.embedded.generator import rows
from tandem.data.embedded.rule import Judgement, judge
from tandem.data.embedded.tokenizer import build_tokenizer, model_config
from tandem.yaml_text import shipped_table

__all__ = ["Judgement", "build_tokenizer", "demo_config", "judge", "model_config", "rows"]


def demo_config(output_dir: str, actor_model: str) -> RunConfig:
    """The configuration of `tandem demo`.

    Args:
        actor_model: the folder of a model with new weights, made with `model_config` and
            `build_tokenizer`.
    """
    knobs = shipped_table(Path(__file__).with_name("demo.yaml"))
    return build_config({**knobs, "output_dir": output_dir, "actor_model": actor_model})
