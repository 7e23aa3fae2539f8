#include "random_operators.h"

#include <torch/torch.h>

namespace tessera::testing {

using at::Tensor;

namespace {

const UnaryOp kUnary[]{
    {"tanh", [](const Tensor& x) { return x.tanh(); }},
    {"sin", [](const Tensor& x) { return x.sin(); }},
    {"sigmoid", [](const Tensor& x) { return x.sigmoid(); }},
    {"neg", [](const Tensor& x) { return -x; }},
    {"square", [](const Tensor& x) { return x.square(); }},
    {"gelu", [](const Tensor& x) { return torch::gelu(x); }},
    {"silu", [](const Tensor& x) { return torch::silu(x); }},
    {"clamp", [](const Tensor& x) { return x.clamp(-0.7, 0.9); }},
    {"softplus", [](const Tensor& x) { return torch::softplus(x); }},
    {"mul -1.5", [](const Tensor& x) { return x * -1.5; }},
    {"add 0.7", [](const Tensor& x) { return x + 0.7; }},
    {"leaky_relu", [](const Tensor& x) { return torch::leaky_relu(x, 0.1); }},
    {"tanh, exp", [](const Tensor& x) { return x.tanh().exp(); }},
    {"1 - x", [](const Tensor& x) { return 1.0 - x; }},
    {"pow 3", [](const Tensor& x) { return x.pow(3); }},
    {"div 3", [](const Tensor& x) { return x / 3.0; }},
    {"log1p of square", [](const Tensor& x) { return (x * x).log1p(); }},
    {"abs", [](const Tensor& x) { return x.abs(); }},
    {"clone", [](const Tensor& x) { return x.clone(); }},
    {"contiguous", [](const Tensor& x) { return x.contiguous(); }},
    {"detach", [](const Tensor& x) { return x.detach(); }},
    {"glu", [](const Tensor& x) { return torch::glu(x, -1); }},
    {"elu", [](const Tensor& x) { return torch::elu(x); }},
    {"squeeze", [](const Tensor& x) { return x.squeeze(); }},
    {"tril", [](const Tensor& x) { return x.tril(); }},
    {"mT", [](const Tensor& x) { return x.mT(); }},
    {"pad",
     [](const Tensor& x) {
       return torch::constant_pad_nd(x, {1, 2}, 0.5);
     }},
    {"flatten", [](const Tensor& x) { return x.flatten(); }},
    {"greater", [](const Tensor& x) { return (x > 0.1).to(torch::kDouble); }},
    {"to long", [](const Tensor& x) { return x.mul(2.3).to(torch::kLong).to(torch::kDouble); }},
    {"sum of all", [](const Tensor& x) { return x.sum(); }},
    {"mean of all", [](const Tensor& x) { return x.mean(); }},
    {"amax of all", [](const Tensor& x) { return x.amax(); }},
    {"prod of all", [](const Tensor& x) { return x.prod(); }},
    {"var of all", [](const Tensor& x) { return x.var(0); }},
    {"norm of all", [](const Tensor& x) { return (x + 3).norm(); }},
};

const BinaryOp kBinary[]{
    {"add", [](const Tensor& x, const Tensor& y) { return x + y; }},
    {"mul", [](const Tensor& x, const Tensor& y) { return x * y; }},
    {"sub alpha", [](const Tensor& x, const Tensor& y) { return torch::sub(x, y, 2); }},
    {"div", [](const Tensor& x, const Tensor& y) { return x / (y.square() + 1); }},
    {"maximum", [](const Tensor& x, const Tensor& y) { return torch::maximum(x, y); }},
    {"atan2", [](const Tensor& x, const Tensor& y) { return torch::atan2(x, y.square() + 1); }},
    {"where greater", [](const Tensor& x, const Tensor& y) { return torch::where(x > y, x, y * 2); }},
    {"lerp", [](const Tensor& x, const Tensor& y) { return torch::lerp(x, y, 0.3); }},
    {"addcmul", [](const Tensor& x, const Tensor& y) { return torch::addcmul(x, y, y, 0.5); }},
    {"mse_loss", [](const Tensor& x, const Tensor& y) { return torch::mse_loss(x, y); }},
    {"huber_loss", [](const Tensor& x, const Tensor& y) { return torch::huber_loss(x, y); }},
    {"smooth_l1_loss, sum", [](const Tensor& x, const Tensor& y) { return torch::smooth_l1_loss(x, y, at::Reduction::Sum); }},
};

const DimOp kAlong[]{
    {"sum", [](const Tensor& x, int64_t d, bool keep) { return x.sum(d, keep); }},
    {"mean", [](const Tensor& x, int64_t d, bool keep) { return x.mean(d, keep); }},
    {"amax", [](const Tensor& x, int64_t d, bool keep) { return x.amax(d, keep); }},
    {"amin", [](const Tensor& x, int64_t d, bool keep) { return x.amin(d, keep); }},
    {"max", [](const Tensor& x, int64_t d, bool keep) { return std::get<0>(x.max(d, keep)); }},
    {"prod", [](const Tensor& x, int64_t d, bool keep) { return x.prod(d, keep); }},
    {"var", [](const Tensor& x, int64_t d, bool keep) { return x.var(at::IntArrayRef{d}, false, keep); }},
    {"std",
     [](const Tensor& x, int64_t d, bool keep) { // of equal numbers it has no gradient
       return torch::cat({x * x + 1, x * 0 + 3}, d).std(at::IntArrayRef{d}, false, keep);
     }},
    {"logsumexp", [](const Tensor& x, int64_t d, bool keep) { return x.logsumexp(d, keep); }},
    {"norm", [](const Tensor& x, int64_t d, bool keep) { return (x + 3).norm(2.0, {d}, keep); }},
    {"cumsum", [](const Tensor& x, int64_t d, bool) { return x.cumsum(d); }},
    {"cumprod", [](const Tensor& x, int64_t d, bool) { return (x * x + 0.1).cumprod(d); }},
    {"softmax", [](const Tensor& x, int64_t d, bool) { return x.softmax(d); }},
    {"log_softmax", [](const Tensor& x, int64_t d, bool) { return x.log_softmax(d); }},
    {"sort", [](const Tensor& x, int64_t d, bool) { return std::get<0>(x.sort(d, true)); }},
    {"topk", [](const Tensor& x, int64_t d, bool) { return std::get<0>(x.topk(1, d)); }},
    {"flip", [](const Tensor& x, int64_t d, bool) { return x.flip({d}); }},
    {"roll", [](const Tensor& x, int64_t d, bool keep) { return x.roll(keep ? 1 : -2, d); }},
    {"unsqueeze", [](const Tensor& x, int64_t d, bool) { return x.unsqueeze(d); }},
    {"select", [](const Tensor& x, int64_t d, bool keep) { return x.select(d, keep ? 0 : -1); }},
    {"transpose", [](const Tensor& x, int64_t d, bool) { return x.transpose(0, d); }},
    {"unfold", [](const Tensor& x, int64_t d, bool) { return x.unfold(d, 2, 1); }},
    {"repeat_interleave", [](const Tensor& x, int64_t d, bool) { return x.repeat_interleave(2, d); }},
    {"every other", [](const Tensor& x, int64_t d, bool keep) { return x.slice(d, keep ? 1 : 0, std::nullopt, 2); }},
    {"diagonal", [](const Tensor& x, int64_t d, bool) { return x.diagonal(0, d, d == 0 ? 1 : 0); }},
};

const WritingOp kWriting[]{
    {"add_", [](const Tensor& x, const Tensor& y) { x.add_(y); }},
    {"mul_", [](const Tensor& x, const Tensor& y) { x.mul_(y); }},
    {"copy_", [](const Tensor& x, const Tensor& y) { x.copy_(y); }},
    {"zero_", [](const Tensor& x, const Tensor&) { x.zero_(); }},
    {"fill_", [](const Tensor& x, const Tensor&) { x.fill_(0.4); }},
    {"tanh_", [](const Tensor& x, const Tensor&) { x.tanh_(); }},
    {"clamp_", [](const Tensor& x, const Tensor&) { x.clamp_(-0.4, 0.6); }},
    {"masked_fill_", [](const Tensor& x, const Tensor& y) { x.masked_fill_(y.detach() > 0, -0.2); }},
    {"slice.mul_", [](const Tensor& x, const Tensor&) { x.slice(0, 1, 3).mul_(2); }},
    {"select of transpose.add_", [](const Tensor& x, const Tensor&) { x.transpose(0, -1).select(0, 0).add_(1.0); }},
    {"flat.copy_", [](const Tensor& x, const Tensor& y) { x.view({-1}).copy_(y.expand_as(x).reshape({-1})); }},
    {"add_ without grad mode",
     [](const Tensor& x, const Tensor&) {
       const at::NoGradGuard no_grad;
       x.add_(0.5);
     }},
    {"detach.mul_", [](const Tensor& x, const Tensor&) { x.detach().mul_(0.5); }},
    {"_foreach",
     [](const Tensor& x, const Tensor& y) {
       const at::NoGradGuard no_grad;
       torch::_foreach_mul_({x.detach()}, 1.1);
       torch::_foreach_add_({x.detach()}, {y.detach()}, 0.3);
     }},
};

} // namespace

c10::ArrayRef<UnaryOp> unary_ops() { return kUnary; }
c10::ArrayRef<BinaryOp> binary_ops() { return kBinary; }
c10::ArrayRef<DimOp> ops_along_a_dim() { return kAlong; }
c10::ArrayRef<WritingOp> writing_ops() { return kWriting; }

} // namespace tessera::testing
