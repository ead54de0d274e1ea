import copy, sys, time, torch, replearn
from torch import nn
from torch.utils.checkpoint import checkpoint
from replearn.training.methods import method_for, Setting
from replearn.training.recipe import Variant
print(torch.__version__)
dev="cuda"
torch.backends.cuda.matmul.allow_tf32=True
def resnet(): torch.manual_seed(0); return replearn.models.CifarResNet(32)
def vit(drop=0.0):
    torch.manual_seed(0)
    from timm.models.vision_transformer import VisionTransformer
    return VisionTransformer(img_size=32, patch_size=4, embed_dim=192, depth=12, num_heads=3, num_classes=10, drop_path_rate=drop)
def build(mk, name):
    m=mk().to(dev, memory_format=torch.channels_last)
    me=method_for(Setting(Variant(label="x", method=name, first=2, drop_rate=0.3), 0, 3))
    return me, me.prepare(m).train()
def steps(mk, name, mode, n=12):
    me,m=build(mk,name)
    torch.manual_seed(3)
    x=torch.randn(512,3,32,32,device=dev).to(memory_format=torch.channels_last); y=torch.randint(0,10,(512,),device=dev)
    opt=torch.optim.SGD(replearn.param_groups(m,1e-4), lr=torch.tensor(0.02,device=dev), momentum=0.9)
    me.start_epoch(m,0,lambda:x)
    f=torch.compile(m) if mode=="compile" else m
    def one():
        with torch.autocast("cuda",torch.bfloat16): loss=nn.functional.cross_entropy(f(x),y)
        opt.zero_grad(set_to_none=False if mode=="graph" else True); loss.backward(); opt.step(); return loss
    losses=[]
    torch.cuda.reset_peak_memory_stats()
    if mode=="graph":
        s=torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s):
            for _ in range(3): losses.append(one().item())
        torch.cuda.current_stream().wait_stream(s)
        g=torch.cuda.CUDAGraph()
        with torch.cuda.graph(g): L=one()
        run=lambda: (g.replay(), L)[1]
    else:
        def run():
            me.start_step(m,0,len(losses)); return one()
        for _ in range(3): losses.append(run().item())
        torch.cuda.reset_peak_memory_stats()
    while len(losses)<n: losses.append(run().item())
    torch.cuda.synchronize(); t=time.time()
    for i in range(20): L=run() if mode=="graph" else (me.start_step(m,0,100+i), one())[1]
    torch.cuda.synchronize()
    bn=[b for k,b in m.named_buffers() if "running_mean" in k]
    print(f"{mk.__name__:7} {name:34} {mode:8} {losses[0]:.4f} {losses[n-1]:.4f} {(time.time()-t)/20*1e3:7.2f} ms  {torch.cuda.max_memory_allocated()/2**20:7.0f} MiB", f"bn {bn[5].float().norm():.5f}" if bn else "", flush=True)
# raw: does capture allow preserve_rng_state?
for keep in (True, False):
    net=nn.Sequential(nn.Linear(8,8),nn.ReLU(),nn.Linear(8,8)).to(dev); x=torch.randn(4,8,device=dev)
    def one(): 
        o=checkpoint(net,x,use_reentrant=False,preserve_rng_state=keep).sum(); o.backward(); return o
    try:
        s=torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s): one(); one()
        torch.cuda.current_stream().wait_stream(s)
        g=torch.cuda.CUDAGraph()
        with torch.cuda.graph(g): one()
        g.replay(); torch.cuda.synchronize(); print("raw capture preserve",keep,"works")
    except Exception as e: print("raw capture preserve",keep,"FAILS",str(e)[:200])
def tried(*a):
    try: steps(*a)
    except Exception as e: print(a[0].__name__,*a[1:],"FAILED",type(e).__name__,str(e)[:300], flush=True)
for name in ("e2e","removal","repl","checkpointing","repl+checkpointing","adaptive","adaptive+checkpointing","stochastic_depth","repl+stochastic_depth","stochastic_depth+checkpointing"):
    tried(resnet,name,"eager")
    if "stoch" not in name: tried(resnet,name,"graph")
for name in ("e2e","repl","skip_attention","checkpointing","skip_attention+checkpointing","stochastic_depth","adaptive"):
    tried(vit,name,"eager")
    if "stoch" not in name: tried(vit,name,"graph")
for name in ("e2e","checkpointing"): tried(resnet,name,"compile")
for name in ("skip_attention",): tried(vit,name,"compile")
