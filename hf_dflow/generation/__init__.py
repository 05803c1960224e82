SPECULATION_TYPE = "dflow"  # the flag of `generate`
