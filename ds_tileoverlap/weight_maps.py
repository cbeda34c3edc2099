"""Tables of tensor maps, through which the expert GEMM reads each expert's weight where it lies."""

from __future__ import annotations

import torch


class WeightMaps:
    """One layer's tables, made again whenever a weight has moved."""

    def __init__(self):
        self._tables: dict[tuple, tuple[list, torch.Tensor]] = {}
        self._rooms: dict[tuple, torch.Tensor] = {}

    def room(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Zeros at first, and the same memory at every call: its tables are made once. Dtype and device of ``like``."""
        key = (name, shape, like.dtype, like.device)
        if key not in self._rooms:
            # An inference may be the first to need it; training could not write into a tensor made by that.
            with torch.inference_mode(False):
                self._rooms[key] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        return self._rooms[key]

    def of(self, op, name: str, stack, dtype: torch.dtype, transposed: bool) -> torch.Tensor:
        """The table of one projection on the device.

        Args:
            op: the compiled operator.
            name: which projection; its table is kept under this name.
            stack: (first expert, end, view [n, rows, columns]) for each run of the local experts.
            dtype: bfloat16 or float16.
            transposed: whether the GEMM sums over the rows of a weight instead of its columns.

        Returns:
            [E_local * 128] uint8.
        """
        places = [(view.data_ptr(), view.shape, view.stride(0)) for _, _, view in stack]
        kept = self._tables.get(key := (name, dtype, transposed))
        if kept is not None and kept[0] == places:
            return kept[1]
        rows, columns = stack[0][2].shape[1:]
        element = stack[0][2].element_size()
        addresses = [first + i * step * element for first, (count, *_), step in places for i in range(count)]
        host = torch.empty(len(addresses) * op.MAP_BYTES, dtype=torch.uint8)
        op.encode_weights(
            maps=host.data_ptr(),
            weights=addresses,
            rows=rows,
            columns=columns,
            is_half=dtype == torch.float16,
            b_is_transposed=transposed,
        )
        table = host.to(stack[0][2].device)
        self._tables[key] = (places, table)
        return table
