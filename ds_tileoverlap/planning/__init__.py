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
"""
