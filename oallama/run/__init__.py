"""Running a plan: in llama-server (the engine), or in this process (Placer.llama)."""
