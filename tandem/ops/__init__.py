"""The operations that training and generation share, so that both give the same numbers.

`attention` is what every attention layer calls, `dense` the rest of a layer, `native` builds the
C++ behind them. Each has a path in plain torch beside it.
"""
