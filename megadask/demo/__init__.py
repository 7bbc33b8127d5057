"""The demo: real text, real loaders, and data-parallel trainers on one machine."""
