"""The folder that holds `mori`. It is on nobody's path by itself, so that it never hides a real MoRI:

PYTHONPATH=$(python -m kvferry.dropin) python -m vllm.entrypoints.openai.api_server ...
"""
