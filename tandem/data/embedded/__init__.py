"""The embedded default: a data set, a tokenizer and a model that need no file and no network.

Short instructions of ten kinds, each with a preferred and a rejected answer, written by a seeded
generator. A hidden rule, which training never sees, judges any answer; so the three steps can be
measured by something other than the reward model that they train.

    rows             the data set
    judge            the hidden rule
    build_tokenizer  a byte-level BPE tokenizer with a chat template
    model_config     a small Llama
    demo_config      the knobs of a run on two cores
"""

from tandem.data.embedded.generator import rows
from tandem.data.embedded.model import model_config
from tandem.data.embedded.rule import Judgement, judge
from tandem.data.embedded.settings import demo_config
from tandem.data.embedded.tokenizer import build_tokenizer

__all__ = ["Judgement", "build_tokenizer", "demo_config", "judge", "model_config", "rows"]
