"""``ds-tileoverlap bench``: what this package gains on a machine, measured, and what the records of that say.

    layer     one MoE layer against DeepSpeed's and AutoEP's
    stages    the fused stages of ``overlap`` against their parts
    step      training steps under DeepSpeed's engine
    arms      the same layer as different packages run it
    measure   how times are taken, and on what
    shapes    what is measured; ``options``: how

``command`` checks what was asked for and starts ranks; each is a ``worker``, which writes records.
``records`` reads them, ``report`` shows them as Markdown and ``page`` as HTML.
"""
