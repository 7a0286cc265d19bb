"""What each tab shows, from the public functions: no gradio, no request, no session."""
