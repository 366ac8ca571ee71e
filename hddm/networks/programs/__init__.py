"""Networks as programs: graphs of operators that `torch.export` records, read and run by hddm itself.

`archive` checks a ``.pt2`` file and takes the text of its graph, `graph` parses that into nodes, `operators`
lists the operators that a node may name, and `network` runs the nodes. `tracing` makes such a file of a
network. torch's own loader is never called: it unpickles, and evaluates texts of the file as code.
"""
