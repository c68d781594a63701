"""Secure aggregation (SecAgg+): the server learns only the sum of a cohort's updates.

    Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017
    Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020: neighbours

The protocol has four stages. Each one is a message to every client and a message back:

    keys     a client makes two key pairs and sends the public keys
    shares   it splits its two secrets into shares, one per neighbour, each sealed for that neighbour
    masked   it trains and sends  q_i + PRG(b_i) + sum_{j > i} PRG(s_ij) - sum_{j < i} PRG(s_ij)   mod 2^w
    unmask   it reveals its shares of b_j for clients whose vector arrived, and of s_j for those that vanished

`client.Participant` and `server.Aggregation` are state machines that turn one message into the next. They know nothing
of the transport: the simulator and Flower use the same code. With user-level privacy, q_i has the client's share of the
noise (`distributed_noise`).
"""

from fedpara.secure.settings import SECURE, SecAgg, read_secure

__all__ = ["SECURE", "SecAgg", "read_secure"]
