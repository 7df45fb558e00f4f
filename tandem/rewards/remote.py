"""A reward from a server: answers go by HTTP to where a reward model runs, rewards come back.

The protocol is OpenRLHF's (`--remote_rm_url`), with the turns added:

    POST {"query": [prompt and answer], "prompts": [...], "labels": [...], "messages": [[...]]}
    200  {"rewards": [number or null, ...]}
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse, IncompleteRead, responses
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request

from tandem.errors import ConfigError, StoppedWaiting
from tandem.rewards.calling import CallError, is_reward
from tandem.rewards.connection import Connection
from tandem.rewards.running_clock import SLICE, RunningClock
from tandem.stopping import stop_asked
from tandem.text import visible

FIRST_PAUSE = 1.0
"""Seconds before a request is sent again; each further pause is twice as long."""
_LONGEST_PAUSE = 15.0
_SLICE = 0.1
"""Seconds of a pause after which it is seen that a signal asked for a stop."""
_LEEWAY_SECONDS = 3600.0
"""By how much a socket's timeout exceeds the deadline: it goes on while the process is stopped."""
_LONGEST_REPLY = 64 * 2**20
_SHOWN = 120
_SCHEMES = ("Bearer", "Basic", "Token")
"""First words of an Authorization header, which are no secrets."""
_HOW = "Write http://HOST:PORT/PATH or https://..., or tandem:remote?url=...&option=value"


class _NotYetError(Exception):
    """A request that may succeed later; the text says what happened. pause: seconds that the
    server asks for."""

    def __init__(self, text: str, pause: float = 0.0) -> None:
        super().__init__(text)
        self.pause = pause


@dataclass(frozen=True, slots=True)
class _Token:
    """A header that tells the server who asks; it must never be shown."""

    header: str
    value: str = field(repr=False)

    def hidden_in(self, text: str) -> str:
        """A text in which the value cannot be read."""
        words = self.value.split()
        secrets = words[1:] if len(words) > 1 and words[0] in _SCHEMES else words
        for secret in sorted(secrets, key=len, reverse=True):
            quoted = json.dumps(secret)[1:-1]  # as JSON writes it, and PHP's
            for form in (secret, quoted, quoted.replace("/", "\\/")):
                text = text.replace(form, "***")
        return text


@dataclass(frozen=True, slots=True)
class _NoReward:
    """What stands in a reply in place of a reward: a text in which no token can be read. It is no
    number, so that its answer alone fails, with this text."""

    text: str

    def __repr__(self) -> str:
        return self.text


class RemoteReward:
    """The rewards that a server gives. It is called in the training process, `batch_size` answers
    at a time.

    A request that is refused, or answered with 429 or 5xx, is sent again with growing pauses, and a
    line says so each time; after `retry_seconds` of pauses without a success nothing waits any
    more until the server answers again.
    """

    in_process = True

    def __init__(
        self,
        *,
        url: str = "",
        token_env: str = "",
        header: str = "Authorization",
        batch_size: int = 64,
        retry_seconds: float = 60.0,
        checks_answer: bool = False,
    ) -> None:
        """
        Args:
            url: where to POST. token_env: the environment variable with a token; it is sent as
                `Authorization: Bearer TOKEN`, or plainly in another `header`.
            checks_answer: the rewards judge right and wrong, as the self-test takes it.
        Raises:
            ConfigError: one of these cannot be used.
        """
        self.url = _checked_url(url)
        self.batch_size = batch_size
        self.checks_answer = checks_answer
        self._retry_seconds = retry_seconds
        self._token = _token_of(token_env, header) if token_env else None
        self._label, self._seconds = "remote", 5.0
        self._print_line: Callable[[str], None] = print
        self._waited = 0.0
        if batch_size < 1 or not 0 <= retry_seconds < float("inf"):
            raise ConfigError(
                "tandem:remote must have a batch_size above 0 and retry_seconds of 0 or more; got "
                f"{batch_size} and {retry_seconds:g}. Change them."
            )

    def told(self, label: str, seconds: float, print_line: Callable[[str], None]) -> RemoteReward:
        """The same with a name, a deadline in seconds for each answer of a request, and something
        that shows lines to the user."""
        found = copy.copy(self)
        found._label, found._seconds, found._print_line = label, seconds, print_line
        return found

    def __call__(
        self,
        prompt_texts: Sequence[str],
        completions: Sequence[str],
        messages: Sequence[Sequence[Mapping[str, str]]],
        **columns: Sequence[Any],
    ) -> list[Any]:
        """The server's rewards, one per completion, in one request.

        Raises:
            CallError: there are none; the text says why, in one line.
            StoppedWaiting: a signal asked for a stop while the server was waited for.
        """
        turns = zip(messages, completions, strict=True)
        body = {
            "query": [p + c for p, c in zip(prompt_texts, completions, strict=True)],
            "prompts": list(prompt_texts),
            "labels": _without_nan(columns.get("answer", [None] * len(completions))),
            "messages": [[*map(dict, t), {"role": "assistant", "content": c}] for t, c in turns],
        }
        # A column's values need not be JSON's: those of dates, say, go as their text.
        content = json.dumps(body, default=str, allow_nan=False).encode("ascii")
        pause = FIRST_PAUSE
        while True:
            try:
                rewards = self._rewards(content, len(completions))
                self._waited = 0.0
                return rewards
            except _NotYetError as why:
                left = self._retry_seconds - self._waited
                if left <= 0:
                    waited = f" (waited for {self._waited:.0f} s)" if self._waited else ""
                    raise CallError("exception", f"{why}{waited}") from None
                pause = min(max(pause, why.pause), left)
                self._print_line(
                    f"reward function {self._label} waits: {why}. It asks again in {pause:.0f} s, "
                    f"and for {left:.0f} s at most"
                )
                self._pause(pause)
                self._waited += pause
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _pause(self, seconds: float) -> None:
        """Wait, but not once a signal has asked for a stop: the server may never come, and without
        its rewards the step cannot be finished."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if number := stop_asked():
                raise StoppedWaiting(
                    number,
                    f"while reward function {self._label} waited for its server; what was running "
                    "is not saved",
                )
            time.sleep(min(left, _SLICE))

    def _rewards(self, content: bytes, count: int) -> list[Any]:
        """The rewards in the reply to a request, `_NoReward` where there is something else."""
        reply = self._reply(content, self._seconds * count)
        try:
            found = json.loads(reply)
        except (ValueError, RecursionError):  # bytes that are no text, too; lists of lists of ...
            found = None
        shape = f'{self.url} must reply with JSON, {{"rewards": [...]}}'
        if not isinstance(found, Mapping) or not isinstance(found.get("rewards"), list):
            raise CallError("result", f"{shape}; got {self._shown(reply)}")
        rewards = found["rewards"]
        if len(rewards) != count:
            raise CallError("result", f"{shape} with {count}, one per query; got {len(rewards)}")
        return [self._reward(reward) for reward in rewards]

    def _reward(self, value: Any) -> Any:
        """A finite number or None as it is; else what can be shown of it."""
        if value is None or (is_reward(value) and not isinstance(value, bool)):
            return value
        if isinstance(value, str):
            return _NoReward(repr(self._safe(value)))
        return _NoReward(self._safe(json.dumps(value)))

    def _reply(self, content: bytes, seconds: float) -> bytes:
        """The body of the reply to a request, within its deadline.

        The request runs in a thread: a server that sends a byte now and then never lets a socket's
        own timeout expire. At the deadline its connection is closed, which ends the thread.
        """
        connection = Connection()
        found: list[bytes | BaseException] = []

        def ask() -> None:
            try:
                found.append(self._posted(connection, content, seconds + _LEEWAY_SECONDS))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=ask, name="remote reward", daemon=True)
        thread.start()
        try:
            clock = RunningClock()
            while thread.is_alive() and (left := seconds - clock()) > 0:
                thread.join(min(SLICE, left))
            # Before the connection is closed, which could pass for the end of the reply.
            reply = found[0] if found else TimeoutError()
        finally:
            connection.close()
        if isinstance(reply, TimeoutError):
            raise CallError("timeout", f"{self.url} took more than {seconds:g} s")
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def _posted(self, connection: Connection, content: bytes, seconds: float) -> bytes:
        headers = {"Content-Type": "application/json", "User-Agent": "tandem"}
        if self._token is not None:
            headers[self._token.header] = self._token.value
        request = Request(self.url, content, headers, method="POST")
        try:
            with connection.open(request, seconds) as response:
                return _body(response, self.url)
        except HTTPError as error:
            with error:
                raise self._refusal(error) from None
        except URLError as error:
            raise self._unreachable(error.reason) from None
        except IncompleteRead as error:
            got = f"a reply that broke off after {len(error.partial)} bytes"
            raise _NotYetError(f"{self.url} must send all of its reply; got {got}") from None
        except OSError as error:  # the server went away meanwhile
            raise self._unreachable(error) from None
        except HTTPException as error:  # not its class: an empty text says nothing, either
            text = f"{self.url} must answer as HTTP says; got {self._shown(str(error))}"
            raise CallError("exception", text) from None

    def _refusal(self, error: HTTPError) -> Exception:
        """What a status other than 200 means."""
        name = responses.get(error.code, "")
        try:
            # All of it, since half a token would be shown.
            body = self._shown(error.read(_LONGEST_REPLY))
        except (OSError, HTTPException):
            body = "nothing"
        text = f"{self.url} must answer with status 200; got {error.code} {name}, {body}"
        if error.code != 429 and error.code < 500:
            return CallError("exception", text)
        after = error.headers.get("Retry-After") or ""
        return _NotYetError(text, float(after) if after.isdecimal() else 0.0)

    def _unreachable(self, reason: object) -> BaseException:
        """What an error of the connection means."""
        if isinstance(reason, TimeoutError) and reason.errno is None:  # else the system's own
            return reason
        said = str(getattr(reason, "strerror", None) or reason) or type(reason).__name__
        text = f"{self.url} must be reachable; got: {self._safe(said)}"
        is_final = isinstance(reason, ssl.SSLError) or (
            isinstance(reason, socket.gaierror) and reason.errno != socket.EAI_AGAIN
        )
        if is_final or not isinstance(reason, OSError):
            return CallError("exception", text)
        return _NotYetError(text)

    def _shown(self, reply: bytes | str) -> str:
        """The beginning of what a server said, for a message."""
        text = reply if isinstance(reply, str) else reply.decode("utf-8", "replace")
        return repr(self._safe(text)) if text.strip() else "an empty reply"

    def _safe(self, text: str) -> str:
        """The beginning of a text in one printable line, without the token."""
        if self._token is not None:  # first: a part of a token would not be found
            text = self._token.hidden_in(text)
        return visible(" ".join(text.split())[:_SHOWN])


def _without_nan(value: Any) -> Any:
    """The same with None for the numbers that JSON has not: NaN and the infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _without_nan(item) for name, item in value.items()}
    return [*map(_without_nan, value)] if isinstance(value, list | tuple) else value


def _body(response: HTTPResponse, url: str) -> bytes:
    content = response.read(_LONGEST_REPLY + 1)
    if len(content) > _LONGEST_REPLY:
        raise CallError("result", f"{url} must reply with at most {_LONGEST_REPLY >> 20} MiB")
    if response.length:  # a read of a number of bytes does not raise it by itself
        raise IncompleteRead(content, response.length)
    return content


def _checked_url(url: str) -> str:
    """A URL that requests can be sent to, as it is."""
    try:
        parts = urlsplit(url)
        is_http = parts.scheme.lower() in ("http", "https")
        is_usable = bool(is_http and parts.hostname and parts.port != 0 and not parts.fragment)
    except ValueError:
        is_usable = False
    if is_usable and "@" in parts.netloc:
        raise ConfigError(
            "the URL of a reward must hold no user name or password, which run files would show; "
            "got one. Put a token into an environment variable and name that: "
            "tandem:remote?url=...&token_env=NAME."
        )
    if not is_usable or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"the URL of a reward must be a server's; got {visible(url)!r}. {_HOW}.")
    if re.search(r",https?:", url):
        raise ConfigError(
            f"the URL of a reward must be one; got several in {visible(url)!r}. Put spaces between "
            "them in place of commas."
        )
    return url


def _token_of(variable: str, header: str) -> _Token:
    """The header with the token that an environment variable holds."""
    if not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII):  # perhaps the token itself
        raise ConfigError(
            "tandem:remote?token_env must name an environment variable; got something else, which "
            "is not shown here. Put the token into a variable, and write the variable's name."
        )
    if not re.fullmatch(r"[A-Za-z0-9-]+", header):
        raise ConfigError(
            f"tandem:remote?header must be a header's name; got {visible(header)!r}. Change it."
        )
    token = os.environ.get(variable, "").strip()
    if not token or not token.isascii() or not token.isprintable():
        found = "characters that no header can hold" if token else "nothing"
        raise ConfigError(
            f"the environment variable {variable} must hold the token of a reward's server; got "
            f"{found}. Set it before the run."
        )
    is_standard = header.lower() == "authorization" and " " not in token
    return _Token(header, f"Bearer {token}" if is_standard else token)
