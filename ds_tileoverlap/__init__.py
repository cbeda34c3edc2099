"""A drop-in for ``deepspeed.moe.layer.MoE``: same parameters, checkpoints and ds_config, a faster routed part.

One layer, stage by stage; each stage is the file of its name:

    forward    route -> layout -> dispatch -> expert_gemm -> combine
    backward   route <---------- combine(dX, dw) <- expert_gemm <- dispatch(dY)

``layer.py`` calls the stages in this order; ``layout.Plan`` is the one object that travels from layout to the last
stage and into backward. ``sequential.py`` and ``reference.py`` are two sets of the same stages. Transport is in
``exchange.py``, options are in ``config.py``.

Importing the package makes ``deepspeed.initialize`` read the ``"tile_overlap"`` block of ds_config, also where a module
has imported that function by name before. Without that block and without :class:`MoE` nothing changes.
"""

from . import versions

versions.check()

from .config import ConfigError, TileOverlapConfig  # noqa: E402
from .exchange import PeerError  # noqa: E402
from .initialize import configure, initialize, install  # noqa: E402
from .layer import MoE  # noqa: E402
from .overlap_group import close  # noqa: E402

install()

__version__ = versions.VERSION
__all__ = ["ConfigError", "MoE", "PeerError", "TileOverlapConfig", "close", "configure", "initialize"]
