"""Distill a teacher into a student from the hidden states of both: the logits of neither head are held.

python docs/examples/distillation.py
"""

import torch
from torch import nn

from cce_dist import linear_kl_divergence

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, STUDENT, TEACHER, TOKENS, TEMPERATURE = 4096, 64, 96, 256, 2.0

features = torch.randn(TOKENS, 32, device=device)
teacher, teacher_head = nn.Linear(32, TEACHER, device=device), nn.Linear(TEACHER, VOCAB, bias=False, device=device)
student, student_head = nn.Linear(32, STUDENT, device=device), nn.Linear(STUDENT, VOCAB, bias=False, device=device)
with torch.no_grad():
    teacher_head.weight.mul_(20)  # a teacher that is sure of something
    teacher_hidden = teacher(features)
mask = torch.rand(TOKENS, device=device) < 0.9  # tokens that count, such as those of a response

optimizer = torch.optim.Adam([*student.parameters(), *student_head.parameters()], lr=1e-2)
for step in range(60):
    loss = linear_kl_divergence(
        student(features), student_head.weight, teacher_hidden, teacher_head.weight,
        kind="forward", logit_scale=1 / TEMPERATURE, teacher_logit_scale=1 / TEMPERATURE, mask=mask, reduction="mean",
    )  # fmt: skip
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 or step == 59:
        print(f"step {step}: KL(teacher || student) {loss.item():.4f} nats per token")
