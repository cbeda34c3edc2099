"""What a layer would do, predicted on a CPU from measured rates and the code's own schedule: ``ds-tileoverlap plan``,
``tune``, and what ``auto`` decides.

    routing     which rank gets which rows: drawn from a seed, as the layout's Plan
    simulation  workers that take pieces in order, each piece when it is ready
    stages      the four stages in which an exchange and a GEMM are one kernel, on that Plan and its schedule
    profile     rates of one GPU and link; ``fit`` finds them in the records of ``bench run stages``
    machine     which profile holds here; ``tune`` measures one
    choices     what ``auto`` becomes by it
    forecast    the whole answer: times, memory, choices, verdict; ``report`` and ``timeline`` show it

Only the counts of the routing are drawn: which token goes where does not matter to the time.

    ds-tileoverlap plan --shape H=2048,I=768,E=128,k=8,tokens=8192 --ranks 2 --png plan.png
    ds-tileoverlap plan --shape H=2048,I=768,E=128,k=8,tokens=8192 --ranks 16 --skew 0.1 --link-gbs 50 --link-us 5

The fullest rank is simulated tile by tile in the order that the code would use: times on both backends, what stays
exposed, bytes on the link, memory, what the code chooses and why, a timeline. The package's rates are fitted to the
stage records in examples/results, all arms of which they then predict within 10 %, NCCL's all-to-all of the skewed
shapes within 11 %; a shape that is left out of the fit within 14 %, except the smallest. A whole layer adds routing,
layout, weight gradients and its own launches. Other links than the measured one, and groups of more than two ranks, are
extrapolations. ``tune`` keeps its rates in ~/.cache/ds_tileoverlap for this GPU, link, group size and software.
"""
