import dataclasses, json, os, sys, time, cProfile, pstats, io

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import torch, pager
from torch import nn
from pager.config import Checks
from pager.tools.language_model import make_model
from pager.tools.model_sizes import PRESETS

out = sys.argv[1]


def profile(model, step, name):
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    t = time.perf_counter()
    step()
    host = time.perf_counter() - t
    torch.cuda.synchronize()
    total = time.perf_counter() - t
    pr = cProfile.Profile()
    pr.enable()
    step()
    pr.disable()
    torch.cuda.synchronize()
    s = io.StringIO()
    pstats.Stats(pr, stream=s).sort_stats("tottime").print_stats(35)
    open(f"{out}/profile-{name}.txt", "w").write(s.getvalue())
    print(json.dumps({"name": name, "host": host, "total": total}))


for daemon in ("inline", "thread"):
    sizes = PRESETS["3b"]
    model = make_model(sizes, seed=0, device="meta")
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ex = torch.zeros(2, 1, 2048, dtype=torch.long)
    pager.manage(
        model,
        opt,
        device="cuda",
        device_budget="12GiB",
        prefetch_distance=8,
        example_inputs=(ex[0], ex[1]),
        checks=Checks(daemon=daemon),
    )
    tok = torch.randint(0, 32000, (2, 1, 2048), device="cuda")
    rt = model.pager._runtime
    prev = [0]

    def step(first=False):
        loss = model(tok[0], tok[1])
        loss.backward()
        if first:
            rec = [(rt.space.segments[r.segment].name, int(r.phase)) for r in rt.engine.timeline.recorded]
            tr = rt.planner.trace
            cap = [
                (rt.space.segments[s].name, int(p))
                for s, p in zip(tr.segment.tolist(), tr.phase.tolist())
                if p < 4
            ]
            print("order", rec == cap, len(rec), len(cap))
            for i, (a, b) in enumerate(zip(rec, cap)):
                if a != b:
                    print(i, rec[i - 3 : i + 6], cap[i - 3 : i + 6])
                    break
        opt.step()
        opt.zero_grad()
        d = model.pager.statistics()
        print(
            "dev", d.deviations - prev[0], d.page_in_bytes, d.page_out_bytes, d.stall_seconds, d.major_faults
        )
        prev[0] = d.deviations

    if daemon == "inline":
        step(True)
    profile(model, step, daemon)
    model.pager.close()
    del model, opt, rt
    import gc

    gc.collect()
# LSTM: plain against plain without the flat weight buffer
torch.manual_seed(0)
a = nn.LSTM(96, 96, 2, batch_first=True).cuda()
b = nn.LSTM(96, 96, 2, batch_first=True).cuda()
b.load_state_dict(a.state_dict())
for p in b.parameters():
    p.data = p.data.clone()
x = torch.randn(4, 10, 96, device="cuda")
import warnings

warnings.simplefilter("ignore")
for tf in (True, False):
    torch.backends.cudnn.allow_tf32 = tf
    print(
        "lstm tf32",
        tf,
        (a(x)[0] - b(x)[0]).abs().max().item(),
        (a(x)[0] - a(x)[0]).abs().max().item(),
        (b(x)[0] - b(x)[0]).abs().max().item(),
    )
for p in b.parameters():
    p.data = torch.empty(p.numel() + 128, device="cuda")[64 : 64 + p.numel()].view(p.shape).copy_(p.data)
print("lstm other alignment", (a(x)[0] - b(x)[0]).abs().max().item())
