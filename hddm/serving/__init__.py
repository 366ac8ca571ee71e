"""An ensemble while people use it: a page to play with (`page`), and an HTTP service on many machines.

May import `pipelines` and what is below; gradio and Ray are extras, imported when they are used.
"""
