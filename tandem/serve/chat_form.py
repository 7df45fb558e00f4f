"""The form of answers that flags of the chat ask for."""

from __future__ import annotations

from tandem.config.schema import SamplingConfig
from tandem.data.render import Renderer
from tandem.errors import ConfigError
from tandem.generation.request_maker import form_problems


def check_form(sampling: SamplingConfig, renderer: Renderer) -> None:
    """Check the form by a model's tokenizer and template.

    Raises:
        ConfigError: answers in this conversation format cannot have it.
    """
    for problem in form_problems(sampling, renderer):
        flags = problem.replace("sampling.json_schema", "--json-schema")
        raise ConfigError(f"{flags.replace('sampling.regex', '--regex')}.")
