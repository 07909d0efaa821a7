"""OpenAI's fine-tuning interface: files, jobs, their events and checkpoints, graders."""
