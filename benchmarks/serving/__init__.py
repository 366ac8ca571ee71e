"""What a service costs beside the library's own loop: time of a request, and images per second of a crowd."""
