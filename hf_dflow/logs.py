"""Loggers of this package. They are as quiet as transformers is told to be."""

import logging
from typing import Any

from hf_dflow.text import visible


def get_logger(name: str) -> Any:
    """The logger `name`; `transformers.logging.set_verbosity_error()` silences its warnings as well.

    It has transformers' `warning_once` where transformers' logging was imported.
    """
    logger = logging.getLogger(name)
    logger.addFilter(_is_wanted)
    return logger


def _is_wanted(record: logging.LogRecord) -> bool:
    record.msg, record.args = visible(record.getMessage()), ()  # file names and configurations are others' texts
    quietest = logging.getLogger("transformers").level
    return quietest <= logging.WARNING or record.levelno >= quietest
