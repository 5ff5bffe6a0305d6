"""Mamba-3 MIMO by its definition in fp64, and inputs for it, for validate.py."""

import math

import torch
import torch.nn.functional as F

NAMES = (
    "dQ",
    "dK",
    "dV",
    "dADT",
    "dDT",
    "dTrap",
    "dQ_bias",
    "dK_bias",
    "dMIMO_V",
    "dMIMO_Z",
    "dMIMO_Out",
    "dAngles",
    "dD",
    "dZ",
)
#: Where sequences lie in each of the function's arguments: the last dimension, the second, or none.
LAST, SECOND = (3, 4, 5), (0, 1, 2, 11, 13)


def inputs(B, S, G, H, R, N, P, device, dtype):
    """The function's arguments in its order, and the gradient of its output [B, S, H, P]: Q, K [B, S, R, G, N]; V, Z [B, S, H, P]."""
    torch.manual_seed(0)
    shapes = (B, S, R, G, N), (B, S, R, G, N), (B, S, H, P), (B, H, S), (B, S, H, P), (B, S, H, P)
    q, k, v, trap, z, grad = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    DT = 0.05 + 0.2 * torch.rand(B, H, S, device=device)
    ADT = -2 * torch.rand(B, H, S, device=device) * DT
    biases = [torch.randn(H, R, N, device=device) for _ in range(2)]
    weights = [1 + 0.1 * torch.randn(H, R, P, device=device) for _ in range(3)]
    angles = 3 * torch.rand(B, S, H, N // 4, device=device)
    return [q, k, v, ADT, DT, trap, *biases, *weights, angles, torch.randn(H, device=device), z], grad


def definition(Q, K, V, ADT, DT, Trap, Q_bias, K_bias, MIMO_V, MIMO_Z, MIMO_Out, Angles, D=None, Z=None):
    """Mamba-3 MIMO, quadratic in S. Angles turn pairs (n, n + N/2), n < N/4. [B, S, H, P]; without MIMO_Out [B, S, R, H, P]."""
    heads = V.shape[2] // Q.shape[3]
    # A group's heads are neighbours.
    q, k = (x.repeat_interleave(heads, 3) + bias.transpose(0, 1) for x, bias in ((Q, Q_bias), (K, K_bias)))
    angle = (torch.tanh(Angles) * math.pi * DT.transpose(1, 2)[..., None]).cumsum(1)[:, :, None]
    turned = angle.shape[-1]

    def rotated(x):
        (a, rest_a), (b, rest_b) = (half.tensor_split([turned], -1) for half in x.chunk(2, -1))
        return torch.cat((a * angle.cos() - b * angle.sin(), rest_a, a * angle.sin() + b * angle.cos(), rest_b), -1)

    gamma = DT * torch.sigmoid(Trap)
    scale = gamma + F.pad((DT * torch.sigmoid(-Trap))[..., 1:], (0, 1))
    cs = ADT.cumsum(-1)
    decay = (cs[..., :, None] - cs[..., None, :]).tril(-1).exp().tril(-1) * scale[:, :, None, :]
    x = V[:, :, None] * MIMO_V.transpose(0, 1)  # [B, S, R, H, P]
    scores = torch.einsum("btrhn,bsqhn->bhtrsq", rotated(q), rotated(k)) * decay[:, :, :, None, :, None]
    y = torch.einsum("bhtrsq,bsqhp->btrhp", scores, x)
    here = torch.einsum("bsrhn,bsqhn->bshrq", q, k) * gamma.transpose(1, 2)[..., None, None]
    y = y + torch.einsum("bshrq,bsqhp->bsrhp", here, x) + (0 if D is None else D[:, None] * x)
    if Z is not None:
        y = y * F.silu(Z[:, :, None] * MIMO_Z.transpose(0, 1))
    return y if MIMO_Out is None else (y * MIMO_Out.transpose(0, 1)).sum(2)


def by_definition(lengths=None):
    """`definition` of sequences of several lengths in one."""

    def function(*leaves):
        outs, start = [], 0
        for length in lengths or [leaves[2].shape[1]]:
            part = slice(start, start + length)
            cut = [
                None if x is None else x[..., part] if i in LAST else x[:, part] if i in SECOND else x
                for i, x in enumerate(leaves)
            ]
            outs.append(definition(*cut))
            start += length
        return torch.cat(outs, 1)

    return function


def run(function, tensors, grad):
    """Its output, and the gradients of the tensors that there are."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    out.backward(grad)
    return out.detach(), [None if leaf is None else leaf.grad for leaf in leaves]


def off(found, right):
    """||found - right|| / ||right||."""
    return ((found.double() - right).norm() / right.norm()).item()
