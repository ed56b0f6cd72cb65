"""Everything that touches torch: capture, rules, measuring, emission, the module that trains."""
