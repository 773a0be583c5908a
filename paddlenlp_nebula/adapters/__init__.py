"""What is particular to adapters (LoRA, Prefix, VeRA, LoKr, ReFT from ``paddlenlp.peft``)."""
