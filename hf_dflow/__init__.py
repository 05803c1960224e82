"""Block-diffusion speculative decoding in transformers that reuses what the verifier computed.

Importing this package imports neither torch nor transformers: a public name is imported when it is first used
(`__init__.pyi` lists them), and transformers learns of the flag and of the drafter once its own modules for them are
imported, in either order.
"""

from importlib import import_module

import lazy_loader
import wrapt

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


@wrapt.when_imported("transformers.generation.utils")
def _install_flag(_) -> None:
    import_module("hf_dflow.generation.strategy")  # which installs itself


@wrapt.when_imported("transformers.utils.hub")
def _name_folders_of_bundled_drafters(hub) -> None:
    hub.cached_files = import_module("hf_dflow.checkpoints.names").refuse_bundled_names(hub.cached_files)


@wrapt.when_imported("transformers.models.auto.configuration_auto")
def _register_configuration(_) -> None:
    import_module("hf_dflow.model.configuration")  # which registers itself


@wrapt.when_imported("transformers.models.auto.modeling_auto")
def _register_drafter(modeling_auto) -> None:
    """With a stand-in, imported when it is used: what the drafter needs of transformers may be half imported here."""
    configuration = import_module("hf_dflow.model.configuration").DFlowDrafterConfig
    drafter = wrapt.LazyObjectProxy(lambda: import_module("hf_dflow.model.drafter").DFlowDrafter)
    modeling_auto.MODEL_MAPPING.register(configuration, drafter, exist_ok=True)
