"""Knowledge distillation between clusters: what a teacher tells, how it travels, and how a student learns from it."""
