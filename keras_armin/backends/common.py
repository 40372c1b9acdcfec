def refuse_second_derivatives(*_):
    raise NotImplementedError(
        "The fast way in which `ARMIN` trains has no second derivatives. Use "
        "`ARMIN(..., unroll=True)` or `keras.layers.RNN(ARMINCell(...))`, "
        "which have the same weights and leave gradients to the backend."
    )
