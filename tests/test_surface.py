"""The library as Python code meets it: the names of `tandem`, and the plainest way to use them."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tandem
from tandem.data.render import Renderer
from tandem.errors import ConfigError, DataError
from tandem.models.load import load_causal_lm, load_tokenizer
from tandem.types import Message
from tests.tiny import save_tiny_model


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tiny_model(tmp_path_factory.mktemp("model")))


def test_prompts_are_texts_messages_or_mappings(model_folder: Path) -> None:
    renderer = Renderer(load_tokenizer(str(model_folder)))
    row = renderer.prompt([Message("user", "hi")])
    assert renderer.prompt("hi") == row
    assert renderer.prompt([{"role": "user", "content": "hi"}]) == row
    for wrong in ([{"role": "user"}], ["hi"], [{"role": "user", "content": 3}], 3):
        with pytest.raises(DataError, match="a prompt must be a text, or turns as Message or map"):
            renderer.prompt(wrong)  # type: ignore[arg-type]


def test_generating_takes_a_model_prompts_and_a_renderer(model_folder: Path) -> None:
    model, tokenizer = load_causal_lm(str(model_folder)), load_tokenizer(str(model_folder))
    renderer = tandem.Renderer(tokenizer)
    sampling = tandem.SamplingConfig(max_new_tokens=4)
    rollout = tandem.generate(model, [renderer.prompt("hi")], sampling, tandem.Stops.of(renderer))
    assert len(rollout.responses) == 1


def test_a_folder_may_be_a_path_and_a_trainer_needs_a_reward(model_folder: Path) -> None:
    config = tandem.build_config({"device": "cpu"})
    engine = tandem.make_engine(actor=model_folder, config=config)
    with pytest.raises(ConfigError, match="PPOTrainer must have a reward"):
        tandem.PPOTrainer(engine, config)
    with pytest.raises(ConfigError, match=r"seed must be >= 0"):
        tandem.make_engine(actor=model_folder, config=tandem.RunConfig(seed=-1))


def test_the_package_is_marked_as_typed_for_type_checkers() -> None:
    """Without the marker in the wheel, mypy reads none of its annotations (PEP 561)."""
    root = Path(tandem.__file__).parent
    assert (root / "py.typed").is_file()
    project = tomllib.loads((root.parent / "pyproject.toml").read_text("utf-8"))
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["tandem"]


IMPORTS = (
    "import tandem; tandem.train, tandem.generate",
    "from tandem import generate, train",
    "import tandem.generation.sampler, tandem.training.run_folder",
    "from tandem import *",
)
_IN_FORKS = """
import gc, os, sys  # and the packages that take long, once
gc.disable()
import torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.tensor
import rich.progress, transformers.generation.utils, transformers.modeling_utils
for imports in {imports!r}:
    child = os.fork()
    if child == 0:
        exec(imports)
        import tandem, types
        from tandem import *
        names = [tandem.train, tandem.generate, train, generate]
        right = all(isinstance(name, types.FunctionType) for name in names)
        print(imports, names, file=sys.stderr, flush=True)
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, imports
"""


def test_public_names_are_the_same_things_in_any_order_of_imports() -> None:
    code = _IN_FORKS.format(imports=IMPORTS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_public_name_is_that_of_a_package_or_module() -> None:
    """Python binds a module on its package when it is imported: it would replace the name."""
    below = {module.name for module in pkgutil.iter_modules(tandem.__path__)}
    assert not below & set(tandem.__all__)
    assert all(getattr(tandem, name) is not None for name in tandem.__all__)
