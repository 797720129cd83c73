"""What happens to a request in which something unforeseen is raised: it fails, the others go on."""

from __future__ import annotations

import logging

from llm_core.errors import InternalError, LlmError, is_fault

logger = logging.getLogger(__name__)


def failure_of(error: BaseException, what: str) -> LlmError:
    """The error that ends ``what`` was being done. A fault is logged with its traceback. Raises
    ``error`` again when it asks for the end of the process."""
    if isinstance(error, LlmError):
        return error
    if not is_fault(error):
        raise error
    logger.error("%s failed: %s", what, type(error).__name__, exc_info=error)
    return InternalError(
        f"the engine failed at this request ({type(error).__name__}); its log has the details"
    )
