"""The timeline of one training step, of every rank of an expert-parallel group on one clock.

    recorder -> timeline -> metrics -> perfetto, drawing

On the ``overlap`` backend the kernels write down when each tile was started and made, and when each part of rows was
sent and put in its place (``csrc/trace.cuh``); one-thread kernels between them write down when stages began and ended.
On a CPU the host does so for stages, in which nothing overlaps.

``ds-tileoverlap trace`` traces one step of a layer, the option ``trace`` of ds_config one of a job: all ranks on one
clock, overlap ratio and efficiency of each stage. One of two H200 is in examples/results/trace.
"""
