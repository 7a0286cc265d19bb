"""The tabs of the page, a module each: what it computes, without gradio, then its HTML, its report and its controls."""
