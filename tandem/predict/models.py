"""Models by their config alone: a folder, a hub name in the cache, a published size, `--shape`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from tandem.config.schema import RunConfig
from tandem.config.spellings import listed
from tandem.errors import ConfigError, ModelError
from tandem.files import folder_near
from tandem.memory.dimensions import Shape, scaled, shape_from
from tandem.models.hub_name import base_of, with_revision
from tandem.text import one_line, visible
from tandem.yaml_text import shipped_table

_PUBLISHED = Path(__file__).with_name("families.yaml")
_OTHER_PARTS = {"text_config", "vision_config", "thinker_config"}
_SHAPE_KEYS = ("layers", "width", "inner", "heads", "kv_heads", "vocabulary", "tied", "family")


def config_of(name: str) -> dict[str, Any]:
    """The content of a model's config.json.

    Args:
        name: a folder, of an adapter too, a hub name whose config is in the hub's cache, or a
            published size (with or without "-Instruct" or "-Base").
    Raises:
        ModelError: it is none of these, or its config cannot be read.
    """
    folder = Path(os.path.expanduser(name))  # pathlib raises where there is no such user
    if base := _base_of_adapter(folder):
        return config_of(base)
    file = folder / "config.json" if folder.is_dir() else _cached(name)
    if file is None:
        plain = with_revision(name)[0].lower()
        known = _published().get(plain.removesuffix("-instruct").removesuffix("-base"))
        if known is None:
            raise ModelError(
                f"model {name!r} must be a folder with config.json, a hub name in the hub's cache, "
                f"or a published size; got none of them. {_near(name)}Download its "
                "config.json, or give --shape layers=N,width=N,..."
            )
        return known
    try:
        config = json.loads(file.read_text("utf-8"), object_hook=_number_beyond_json)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or f"no JSON ({error})"
        raise ModelError(f"{file} must be a model's config; got: {why}.") from None
    if config.keys() & _OTHER_PARTS and (text := _decoder_of(file, config)):
        return text
    if "num_hidden_layers" not in config and isinstance(config.get("text_config"), dict):
        config = {"model_type": config.get("model_type"), **config["text_config"]}
    return dict(config)


def _decoder_of(file: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the family that a model's text decoder equals; {} if it equals none.

    Args:
        file: the model's config.json. config: what it holds.
    Raises:
        ModelError: transformers cannot read it.
    """
    from tandem.models.text_families import equal_config, has_equal

    if not has_equal(str(config.get("model_type"))):
        return {}
    from transformers import AutoConfig

    from tandem.models.composite import text_part

    try:
        whole = AutoConfig.from_pretrained(file.parent)
        equal = equal_config(whole)
    except Exception as error:  # OSError, ValueError, KeyError, the strict config's own errors
        raise ModelError(
            f"{file} must be a model's config; got: {one_line(error)[:160]}."
        ) from None
    return {} if equal is None else text_part(whole, file.parent).to_dict()


def _number_beyond_json(found: dict[str, Any]) -> Any:
    """Infinity and its like, as transformers writes them: {"__float__": "Infinity"}."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def _near(name: str) -> str:
    """Advice on the published sizes, or the folder beside it, that a name may mean."""
    names = published_names()
    sizes = {each.rpartition("/")[2].lower(): each for each in names}
    wanted = Path(name).name.lower()
    near = [sizes[size] for size in get_close_matches(wanted, sizes, n=2, cutoff=0.8)]
    if not near and not os.path.exists(os.path.expanduser(name)) and (folder := folder_near(name)):
        near = [visible(folder)]
    return f"Did you mean {listed(near)}? " if near else f"These are {', '.join(names)}. "


def _base_of_adapter(folder: Path) -> str:
    """The model that an adapter's folder is for; "" for any other folder."""
    file = folder / "adapter_config.json"
    if not file.is_file() or (folder / "config.json").is_file():
        return ""
    try:
        name = base_of(json.loads(file.read_text("utf-8")), folder)
    except (OSError, ValueError, AttributeError):
        return ""  # told by the config that is missing
    beside = folder / name
    return str(beside) if name and not Path(name).is_dir() and beside.is_dir() else name


def shape_for(config: Mapping[str, Any], *, scalar: bool = False) -> Shape:
    """A shape by the closed form, or counted by transformers for families without one (slower).

    Raises:
        ModelError: transformers does not know the family either.
    """
    try:
        found = shape_from(config, scalar=scalar)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"a config of {config.get('model_type')!r} must have the sizes of its family; got none "
            f"or a wrong one for {error}."
        ) from None
    if found is not None:
        return found
    from transformers import AutoConfig

    from tandem.memory.shape import shape_of

    try:
        # From a dictionary as a file holds it, where a tuple is a list.
        kind = type(AutoConfig.for_model(str(config.get("model_type"))))
        return shape_of(kind.from_dict(dict(config)), scalar=scalar)
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelError(
            f"model type {config.get('model_type')!r} must be one that transformers knows; got: "
            f"{str(error).splitlines()[0][:160]}."
        ) from None


_MOST, _MOST_LAYERS = 2**24, 10_000
"""Beyond every model; the time of a plan grows with its layers."""


def configs_beside(config: RunConfig) -> dict[str, dict[str, Any]]:
    """The content of config.json of the reference and of the critic's start, where a run names
    them.

    Raises:
        ModelError: as `config_of`.
    """
    named = {"reference": config.reference_model, "critic": config.critic_model}
    return {role: config_of(model) for role, model in named.items() if model}


def config_of_shape(text: str) -> dict[str, Any]:
    """The config that `--shape layers=24,width=2048,...` describes: a Llama, or an OPT.

    Raises:
        ConfigError: a word is unknown, no number, or missing.
    """
    given: dict[str, str] = {}
    for item in text.split(","):
        key, equals, value = item.strip().partition("=")
        if not equals or key not in _SHAPE_KEYS:
            raise ConfigError(
                f"--shape must be NAME=VALUE of {', '.join(_SHAPE_KEYS)}; got {item!r}. Write for "
                "example layers=24,width=2048,heads=16,vocabulary=32000."
            )
        if key in given:
            raise ConfigError(f"--shape must name {key} once; got {text!r}. Remove one of them.")
        given[key] = value
    family, tied = given.pop("family", "llama"), given.pop("tied", "false").lower()
    try:
        sizes = {key: int(value) for key, value in given.items()}
        if min(sizes.values()) < 1 or max(sizes.values()) > _MOST:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--shape must have whole numbers from 1 to {_MOST:,}; got {text!r}."
        ) from None
    if sizes.get("layers", 0) > _MOST_LAYERS:
        raise ConfigError(f"--shape must have at most {_MOST_LAYERS:,} layers; got {text!r}.")
    if missing := [key for key in ("layers", "width") if key not in sizes]:
        raise ConfigError(f"--shape must say {missing[0]}; got {text!r}.")
    width = sizes["width"]
    heads = sizes.get("heads", max(1, width // 64))
    vocabulary = sizes.get("vocabulary", 32000)
    if width % heads or heads % sizes.get("kv_heads", heads):
        raise ConfigError(
            "--shape's width must be a multiple of heads, and heads of kv_heads; got "
            f"{text!r}. Change one of them."
        )
    if family == "opt":
        fixed = _families()["opt"]["fixed"]
        return {**fixed, "num_hidden_layers": sizes["layers"], "hidden_size": width,
                "num_attention_heads": heads, "ffn_dim": sizes.get("inner", 4 * width),
                "word_embed_proj_dim": width, "vocab_size": vocabulary}  # fmt: skip
    if family != "llama":
        raise ConfigError(f"--shape's family must be llama or opt; got {family!r}.")
    return scaled(
        layers=sizes["layers"],
        width=width,
        inner=sizes.get("inner", 8 * width // 3 // 64 * 64 or width),
        heads=heads,
        kv_heads=sizes.get("kv_heads", heads),
        vocabulary=vocabulary,
        tied=tied in ("true", "yes", "1", "on"),
    )


def ladder(config: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The published sizes of a config's family, from the smallest."""
    kind = str(config.get("model_type"))
    family = kind if kind in _families() else "llama"
    names = {name.lower(): name for name in _families()[family]["sizes"]}
    return [(full, _published()[lower]) for lower, full in names.items()]


def published_names() -> list[str]:
    """The names that need no download."""
    return [name for family in _families().values() for name in family["sizes"]]


def _cached(name: str) -> Path | None:
    """The newest config.json of a hub name in the hub's cache, or that of its revision, found
    without asking the hub."""
    name, revision = with_revision(name)
    if name.count("/") > 1 or not name or name.startswith((".", "/", "~")):
        return None
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    root = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    if revision:
        from huggingface_hub import try_to_load_from_cache

        try:
            file = try_to_load_from_cache(name, "config.json", cache_dir=root, revision=revision)
        except ValueError:  # not a name that the hub could have
            return None
        return Path(file) if isinstance(file, str) else None
    folder = root / f"models--{name.replace('/', '--')}" / "snapshots"
    found = sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


@cache
def _families() -> Any:
    return shipped_table(_PUBLISHED)


@cache
def _published() -> dict[str, dict[str, Any]]:
    """Published configs by name in small letters."""
    found: dict[str, dict[str, Any]] = {}
    for family, entry in _families().items():
        for name, sizes in entry["sizes"].items():
            layers, width, heads, *rest = sizes
            config = {**entry["fixed"], "num_hidden_layers": layers, "hidden_size": width,
                      "num_attention_heads": heads}  # fmt: skip
            if family == "opt":
                config |= {"ffn_dim": rest[0], "word_embed_proj_dim": rest[1],
                           "do_layer_norm_before": rest[1] == width}  # fmt: skip
            else:
                keys = ("num_key_value_heads", "intermediate_size", "vocab_size")
                config |= dict(zip(keys, rest, strict=False)) | {"tie_word_embeddings": rest[3]}
            found[name.lower()] = config
    return found
