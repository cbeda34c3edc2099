"""Times one MoE layer against what DeepSpeed users have today, as ``ds-tileoverlap bench run layer`` does.

    torchrun --standalone --nproc_per_node=2 examples/benchmark.py --shapes configs/benchmark_shapes.yaml --out DIR

(with this package installed or its root on PYTHONPATH)
"""

import sys

from ds_tileoverlap.bench.worker import main

if __name__ == "__main__":
    sys.exit(main(["layer", *sys.argv[1:]]))
