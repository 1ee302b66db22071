"""What a program can check of pages, deployment files and saved figures; `python .ci/lint` runs it."""
