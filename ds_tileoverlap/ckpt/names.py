"""What a tensor is called on either side, as ordered pairs of a regular expression and its replacement.

On DeepSpeed's side, with the MoE module at ``<prefix>`` and experts with ``gate_proj``, ``up_proj`` and ``down_proj``:

    <prefix>.deepspeed_moe.experts.deepspeed_experts.E.gate_proj.weight   <prefix>.experts.E.gate_proj.weight
    <prefix>.deepspeed_moe.gate.wg.weight                                 <prefix>.gate.weight

All else has the same name on both sides. Models whose names differ bring a map of their own (:func:`with_map`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from ..arguments import UsageError
from ..expert_names import EXPERTS

Pairs = tuple[tuple[str, str], ...]

# The shape of each projection of an expert: H is hidden_size, I the experts' inner size.
_PROJECTIONS = {"gate_proj.weight": "IH", "up_proj.weight": "IH", "down_proj.weight": "HI"}
_TO_HF = (
    (rf"\.{re.escape(EXPERTS)}\.(\d+)\.", r".experts.\1."),
    (r"\.deepspeed_moe\.gate\.wg\.weight$", ".gate.weight"),
)
_TO_DEEPSPEED = (
    (r"\.experts\.(\d+)\.", rf".{EXPERTS}.\1."),
    (r"\.gate\.weight$", ".deepspeed_moe.gate.wg.weight"),
)


@dataclass(frozen=True)
class Names:
    """A family's names.

    Attributes:
        block: where a layer has its MoE block on Hugging Face's side.
        projections: an expert's tensors there, with the letters of their shapes.
        to_hf, to_deepspeed: pairs that are applied one after the other.
    """

    block: str
    projections: dict[str, str]
    to_hf: Pairs = _TO_HF
    to_deepspeed: Pairs = _TO_DEEPSPEED

    def hf(self, name: str) -> str:
        return _renamed(name, self.to_hf)

    def deepspeed(self, name: str) -> str:
        return _renamed(name, self.to_deepspeed)


def _renamed(name: str, pairs: Pairs) -> str:
    for pattern, replacement in pairs:
        name = re.sub(pattern, replacement, name)
    return name


_SAME = Names("mlp", _PROJECTIONS)
# Model type -> names. transformers calls Mixtral's block `mlp` in memory and `block_sparse_moe` on disk.
FAMILIES = {
    "mixtral": Names(
        "block_sparse_moe",
        {"w1.weight": "IH", "w3.weight": "IH", "w2.weight": "HI"},
        _TO_HF
        + (
            (r"\.mlp\.(experts\.\d+|gate)\.", r".block_sparse_moe.\1."),
            (r"(\.experts\.\d+)\.gate_proj\.", r"\1.w1."),
            (r"(\.experts\.\d+)\.up_proj\.", r"\1.w3."),
            (r"(\.experts\.\d+)\.down_proj\.", r"\1.w2."),
        ),
        (
            (r"\.block_sparse_moe\.", ".mlp."),
            (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
            (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
            (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
        )
        + _TO_DEEPSPEED,
    ),
    "qwen2_moe": _SAME,
    "qwen3_moe": _SAME,
    "olmoe": _SAME,
    "deepseek_v2": _SAME,
    "deepseek_v3": _SAME,
}


def with_map(names: Names, file: Path) -> Names:
    """``names`` for a model that has others on DeepSpeed's side, by a file such as configs/checkpoint_names.yaml.

    The file holds ``to_hf`` and ``to_deepspeed``, lists of [regular expression, replacement]; a conversion needs its
    own direction only. ``to_hf`` is applied before the family's pairs, ``to_deepspeed`` after them.

    Raises:
        UsageError: the file is no such map; lists every fault.
    """
    directions = ("to_hf", "to_deepspeed")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--map: {file}: cannot be read: {error}") from error
    if not isinstance(content, dict) or not content or not set(content) <= set(directions):
        got = list(content) if isinstance(content, dict) else content
        raise UsageError(f"--map: {file}: got {got!r}, expected the keys {' and '.join(directions)}")
    lists = {key: pairs if isinstance(pairs, list) else [pairs] for key, pairs in content.items()}
    faults = [f"{key}[{i}]: {why}" for key in lists for i, pair in enumerate(lists[key]) if (why := _fault(pair))]
    if faults:
        raise UsageError(f"--map: {file}: " + "; ".join(faults))
    to_hf, to_deepspeed = (tuple(map(tuple, lists.get(key, ()))) for key in directions)
    return replace(names, to_hf=to_hf + names.to_hf, to_deepspeed=names.to_deepspeed + to_deepspeed)


def _fault(pair: object) -> str | None:
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        return f"got {pair!r}, expected [regular expression, replacement]"
    try:
        re.sub(*pair, "")
    except (re.error, IndexError) as error:
        return f"got {pair!r}: {error}"
    return None
