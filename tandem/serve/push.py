"""A model's folder to the Hugging Face hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from tandem.checkpoint.beside import manifest_above, verify_beside
from tandem.errors import ConfigError, ModelError
from tandem.files import folder_near
from tandem.models.save import ADAPTER_FOLDER
from tandem.serve.named_model import find_model
from tandem.text import one_line, visible

_LOCAL = ("MANIFEST.json",)
"""Files that say something of this machine's folder only."""
_LARGE_BYTES = 2**27
"""From which a file's hashing is told: it may take seconds, from a slow disk minutes."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A file to upload: its name in the repository and its size."""

    name: str
    num_bytes: int


def push(
    path: str,
    repo: str,
    *,
    which: str = "",
    adapter: bool = False,
    public: bool = False,
    dry_run: bool = False,
    print_line: Callable[[str], None] = print,
) -> list[Upload]:
    """Upload a model's folder to the hub as one commit; the repository is made if it is missing.

    Args:
        path: a model's folder, or a run's, of which `which` names the model.
        repo: OWNER/NAME.
        adapter: only the LoRA adapter that is in the folder.
        public: make a new repository public; by default it is private. An existing one stays as it
            is.
        dry_run: list the files and upload nothing.
    Returns:
        what was, or would be, uploaded.
    Raises:
        ConfigError: the repository's name is wrong, there is no token, or the hub refuses.
        ModelError: there is no such model, or no adapter in its folder.
        CheckpointError: the folder is damaged.
    """
    try:
        validate_repo_id(repo)
        if "/" not in repo:
            raise HFValidationError("it has no owner. Give you/NAME, or your organization's name")
    except HFValidationError as error:
        raise ConfigError(
            f"REPO must be OWNER/NAME; got {visible(repo)!r}: {one_line(error)}"
        ) from None
    folder = _folder_of(find_model(path, which), adapter=adapter)
    files = files_of(folder)
    total = sum(file.num_bytes for file in files)
    if manifest_above(folder) is not None:
        print_line(f"comparing {len(files)} files, {total:,} bytes, with their manifest ...")
    verify_beside(folder)
    for line in notes(folder):
        print_line(line)
    token = get_token()
    if not token and not dry_run:
        raise ConfigError(
            "tandem push must have a token of the hub that may write; got none. Run "
            "`hf auth login`, or set HF_TOKEN."
        )
    endpoint = os.environ.get("HF_ENDPOINT") or None
    if dry_run:
        for file in files:
            print_line(f"  {file.num_bytes:>14,} bytes  {visible(file.name)}")
    print_line(
        f"{'would upload' if dry_run else 'uploading'} {len(files)} files, {total:,} bytes, to "
        f"{repo} ({'public' if public else 'private'} if it is new)"
    )
    if dry_run:
        return files
    api = HfApi(endpoint=endpoint, token=token)
    try:
        api.create_repo(repo, private=not public, exist_ok=True)
        commit = api.create_commit(
            repo,
            [_hashed(file, folder, print_line) for file in files],
            commit_message="Upload a model trained with Tandem",
        )
    except Exception as error:  # the client raises many kinds of errors
        reason = one_line(error.__cause__ or error)[:300]
        raise ConfigError(
            f"the hub must accept {repo}; got {reason}. Check the name, the token's rights and the "
            "connection, and run the same command again."
        ) from error
    print_line(f"uploaded: {commit.commit_url}")
    return files


def _hashed(file: Upload, folder: Path, print_line: Callable[[str], None]) -> CommitOperationAdd:
    """The file as the hub's client takes it, which reads it whole."""
    if file.num_bytes >= _LARGE_BYTES:
        print_line(f"  hashing {visible(file.name)}, {file.num_bytes:,} bytes ...")
    return CommitOperationAdd(file.name, str(folder / file.name))


def files_of(folder: Path) -> list[Upload]:
    """The files of a model's folder that belong into a repository, in order."""
    return [
        Upload(path.relative_to(folder).as_posix(), path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.name not in _LOCAL
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]


def notes(folder: Path) -> list[str]:
    """What others will miss in the folder, and what they will read of this machine."""
    found = []
    if not (folder / "README.md").is_file():
        found.append("note: the folder has no README.md (a model card)")
    for card in sorted(folder.rglob("README.md")):
        if paths := _paths_here(card.read_text("utf-8", "replace")):
            found.append(
                f"note: {card.relative_to(folder)} names paths of this machine, which others will "
                f"read: {visible(', '.join(paths))}; edit it before you upload, if they should not"
            )
    for config in sorted(folder.rglob("adapter_config.json")):
        base = str(json.loads(config.read_text("utf-8")).get("base_model_name_or_path", ""))
        if Path(base).is_absolute():
            found.append(
                f"note: {config.relative_to(folder)} names a base on this machine, "
                f"{visible(base)}; write its hub name there, or others cannot load the adapter"
            )
    return found


def _paths_here(text: str) -> list[str]:
    """The absolute paths in a text that are there on this machine, each once; of file.py:function
    and of data with a part or a column map the file."""
    words = re.findall(r"(?<![^\s`\"'=])/[^\s`\"',|:;@?]+", text)
    return [word for word in dict.fromkeys(words) if os.path.lexists(word)]


def _folder_of(model: str, *, adapter: bool) -> Path:
    """The folder to upload.

    Raises:
        ModelError: it holds no model, or no adapter.
    """
    folder = Path(model)
    if not folder.exists():
        near = folder_near(folder)
        raise ModelError(
            f"{visible(model)} must be a model's folder, or a run's; got no such folder. "
            f"{visible(f'Did you mean {near}?' if near else 'Check the spelling.')}"
        )
    if adapter and not (folder / "adapter_config.json").is_file():
        folder = folder / ADAPTER_FOLDER
    wanted = ["adapter_config.json"] if adapter else ["config.json", "adapter_config.json"]
    if not any((folder / name).is_file() for name in wanted):
        which = "model that was trained with --lora-rank" if adapter else "model's folder"
        raise ModelError(
            f"{visible(str(folder))} must be a folder with {' or '.join(wanted)}; got none. Give a "
            f"{which}, or a run's with a finished stage."
        )
    return folder
