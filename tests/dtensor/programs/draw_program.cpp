#include <fmt/format.h>
#include <tessera/activations/recompute.h>
#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/dtensor/local_map.h>

#include <algorithm>

#include "random_layouts.h"
#include "random_operators.h"
#include "random_programs.h"

namespace tessera::testing {

using at::Tensor;
using Sizes = std::vector<int64_t>;
using Unary = Tensor (*)(const Tensor&);

namespace {

/// Adds steps until the program is long enough. Runs each on plain tensors, to know its shapes and that it is one.
class Drawing {
 public:
  Drawing(uint64_t seed, Sizes mesh_shape) : random_(seed * 7919 + 13), mesh_shape_(std::move(mesh_shape)) {
    program_.seed = seed;
    program_.gradients = static_cast<Gradients>(seed % 4);
    writes_ = random_.chance(60);
    layouts_ = random_.chance(60);
  }

  Program run() {
    for (auto count = 1 + random_.below(3); count > 0; --count) leaf(sizes());
    for (auto count = 5 + random_.below(20); count > 0; --count) step();
    return std::move(program_);
  }

 private:
  void step() {
    const auto kind = random_.below(100);
    if (kind < 16) return unary();
    if (kind < 30) return binary();
    if (kind < 46) return along_a_dim();
    if (kind < 56) return reshaping();
    if (kind < 66) return indexing();
    if (kind < 72) return joining();
    if (kind < 80) return matrix();
    if (kind < 84) return rounding();
    if (kind < 87) return drawing();
    if (kind < 94) return writes_ ? writing() : unary();
    if (layouts_) layout();
  }

  /// False where the plain tensors refuse it, or its numbers grow.
  bool add(Step step) {
    Tensors inputs;
    for (const auto slot : step.inputs) inputs.push_back(values_[slot]);
    Tensors outputs;
    try {
      outputs = step.run({}, inputs);
    } catch (const std::exception&) {
      return false;
    }
    for (const auto& list : {outputs, inputs}) {
      for (const auto& tensor : list) {
        if (tensor.numel() > 2000) return false;
        if (is_real(tensor) && tensor.numel() > 0 && !(tensor.detach().abs().max().item<double>() < 1e3)) return false;
      }
    }
    step.first = values_.size();
    step.outputs = outputs.size();
    values_.insert(values_.end(), outputs.begin(), outputs.end());
    program_.slots = values_.size();
    program_.steps.push_back(std::move(step));
    return true;
  }

  void add(std::string name, std::vector<size_t> inputs, std::function<Tensor(const Tensors&)> run) {
    add({std::move(name), std::move(inputs), [run = std::move(run)](const Stage&, const Tensors& x) { return Tensors{run(x)}; }});
  }

  size_t leaf_of(const Tensor& value, bool requires_grad) {
    const auto placements = draw_placements(random_, value.sizes().vec(), mesh_shape_, is_real(value));
    const auto run = [value, placements, requires_grad](const Stage& stage, const Tensors&) {
      const at::NoGradGuard no_grad;
      auto result = stage.mesh ? Tensor(make(value, *stage.mesh, placements)) : value.to(stage.device).clone();
      return Tensors{result.set_requires_grad(requires_grad)};
    };
    const auto slot = values_.size();
    add({fmt::format("{} {} {}{}", requires_grad ? "leaf" : "constant", c10::str(value.sizes()),
                     c10::toString(value.scalar_type()), tessera::to_string(placements)),
         {},
         run});
    if (requires_grad) program_.leaves.push_back(slot);
    return slot;
  }

  size_t leaf(const Sizes& sizes) { return leaf_of(random_.values(sizes), random_.chance(75)); }
  size_t index(const Sizes& sizes, int64_t bound) { return leaf_of(random_.integers(sizes, std::max<int64_t>(bound, 1)), false); }
  size_t mask(const Sizes& sizes) { return leaf_of(random_.integers(sizes, 2).to(torch::kBool), false); }

  Sizes sizes(int64_t least = 0, int64_t most = 3) {
    Sizes result;
    for (auto d = least + random_.below(most - least + 1); d > 0; --d) {
      result.push_back(random_.chance(3) ? 0 : 1 + random_.below(6));
    }
    return result;
  }

  /// A slot of real numbers with `least` to `most` dims, rather one of the last.
  size_t real(int64_t least = 0, int64_t most = 5) {
    for (int attempt = 0; attempt < 30; ++attempt) {
      const auto count = static_cast<int64_t>(values_.size());
      const auto slot =
          static_cast<size_t>(random_.chance(50) ? count - 1 - random_.below(std::min<int64_t>(count, 5)) : random_.below(count));
      if (is_real(values_[slot]) && values_[slot].dim() >= least && values_[slot].dim() <= most) return slot;
    }
    return leaf(sizes(least, std::max(least, std::min<int64_t>(most, 3))));
  }

  /// A slot that broadcasts with that of `other`.
  size_t beside(size_t other) {
    for (int attempt = 0; random_.chance(70) && attempt < 6; ++attempt) {
      const auto slot = real();
      try {
        at::infer_size(values_[slot].sizes(), values_[other].sizes());
        return slot;
      } catch (const std::exception&) { // they do not
      }
    }
    auto wanted = values_[other].sizes().vec();
    if (random_.chance(30)) wanted.erase(wanted.begin(), wanted.begin() + random_.below(std::ssize(wanted) + 1));
    for (auto& size : wanted) size = random_.chance(20) ? 1 : size;
    return leaf(wanted);
  }

  size_t alike(size_t other) { return leaf(values_[other].sizes().vec()); }

  void unary() {
    const auto& op = random_.of(unary_ops());
    add(op.name, {real()}, [run = op.run](const Tensors& x) { return run(x[0]); });
  }

  void binary() {
    const auto& op = random_.of(binary_ops());
    auto a = real(), b = beside(a);
    if (random_.chance(30)) std::swap(a, b);
    add(op.name, {a, b}, [run = op.run](const Tensors& x) { return run(x[0], x[1]); });
  }

  void along_a_dim() {
    const auto& op = random_.of(ops_along_a_dim());
    const auto a = real(1);
    const auto dim = random_.below(values_[a].dim());
    const bool keep = random_.chance(40);
    add(fmt::format("{} along {}{}", op.name, dim, keep ? ", keep" : ""), {a},
        [run = op.run, dim, keep](const Tensors& x) { return run(x[0], dim, keep); });
  }

  void reshaping() {
    const auto a = real(1);
    const auto dim = random_.below(values_[a].dim()), size = values_[a].size(dim), start = random_.below(size + 1),
               end = start + random_.below(size - start + 1), pieces = 1 + random_.below(3);
    switch (random_.below(6)) {
      case 0: return reshape_to_any(a);
      case 1: return permute(a);
      case 2: return expand(a);
      case 3:
        add({fmt::format("split {} along {}", pieces, dim), {a}, [=](const Stage&, const Tensors& x) {
               return x[0].split(pieces, dim);
             }});
        return;
      case 4:
        if (size > 0) add({fmt::format("unbind {}", dim), {a}, [=](const Stage&, const Tensors& x) { return x[0].unbind(dim); }});
        return;
      default:
        add(fmt::format("slice {} {}:{}", dim, start, end), {a}, [=](const Tensors& x) { return x[0].slice(dim, start, end); });
    }
  }

  void reshape_to_any(size_t a) {
    auto rest = values_[a].numel();
    if (rest == 0) return;
    Sizes wanted;
    for (int d = 0; d < 2; ++d) {
      Sizes divisors;
      for (int64_t n = 1; n <= rest; ++n) {
        if (rest % n == 0) divisors.push_back(n);
      }
      wanted.push_back(random_.of(divisors));
      rest /= wanted.back();
    }
    wanted.push_back(rest);
    const bool view = random_.chance(50);
    add(fmt::format("{} {}", view ? "view" : "reshape", c10::str(c10::IntArrayRef(wanted))), {a},
        [=](const Tensors& x) { return view ? x[0].view(wanted) : x[0].reshape(wanted); });
  }

  void permute(size_t a) {
    Sizes order;
    for (int64_t d = 0; d < values_[a].dim(); ++d) order.insert(order.begin() + random_.below(d + 1), d);
    add("permute " + c10::str(c10::IntArrayRef(order)), {a}, [=](const Tensors& x) { return x[0].permute(order); });
  }

  void expand(size_t a) {
    auto wanted = values_[a].sizes().vec();
    for (auto& size : wanted) size = size == 1 ? 1 + random_.below(4) : size;
    if (random_.chance(50)) wanted.insert(wanted.begin(), 1 + random_.below(3));
    add("expand " + c10::str(c10::IntArrayRef(wanted)), {a}, [=](const Tensors& x) { return x[0].expand(wanted); });
  }

  void indexing() {
    const auto a = real(1, 3);
    const auto whole = values_[a].sizes().vec();
    const auto dim = random_.below(values_[a].dim());
    if (whole[dim] == 0) return; // there is nothing to index
    auto other = whole;
    other[dim] = 1 + random_.below(4);
    const auto at_dim = [dim](const Tensor& index) {
      c10::List<std::optional<Tensor>> list;
      for (int64_t d = 0; d < dim; ++d) list.push_back(std::nullopt);
      list.push_back(index);
      return list;
    };
    const auto named = [dim](const char* name) { return fmt::format("{} {}", name, dim); };
    switch (random_.below(8)) {
      case 0:
        return add(named("index_select"), {a, index({other[dim]}, whole[dim])},
                   [=](const Tensors& x) { return x[0].index_select(dim, x[1]); });
      case 1:
        return add(named("gather"), {a, index(other, whole[dim])}, [=](const Tensors& x) { return x[0].gather(dim, x[1]); });
      case 2:
        return add(named("index"), {a, index(sizes(1, 2), whole[dim])},
                   [=](const Tensors& x) { return torch::index(x[0], at_dim(x[1])); });
      case 3:
        return add(named("scatter_add"), {a, index(whole, whole[dim]), alike(a)},
                   [=](const Tensors& x) { return x[0].scatter_add(dim, x[1], x[2]); });
      case 4:
        return add(named("index_add"), {a, index({other[dim]}, whole[dim]), leaf(other)},
                   [=](const Tensors& x) { return x[0].index_add(dim, x[1], x[2], 0.5); });
      case 5:
        return add(named("index_put, accumulate"), {a, index({other[dim]}, whole[dim]), leaf(other)},
                   [=](const Tensors& x) { return x[0].index_put(at_dim(x[1]), x[2], true); });
      case 6:
        return add(named("scatter of a value"), {a, index(whole, whole[dim])},
                   [=](const Tensors& x) { return x[0].scatter(dim, x[1], 0.25); });
      default: {
        const auto table = real(2, 2);
        add("embedding", {table, index(sizes(1, 2), values_[table].size(0))},
            [](const Tensors& x) { return torch::embedding(x[0], x[1]); });
      }
    }
  }

  void joining() {
    const auto a = real();
    const auto ndim = values_[a].dim();
    if (random_.chance(50) && ndim > 0) {
      const auto dim = random_.below(ndim);
      auto other = values_[a].sizes().vec();
      other[dim] = random_.below(5);
      return add(fmt::format("cat {}", dim), {a, leaf(other), alike(a)}, [=](const Tensors& x) {
        return torch::cat({x[0], x[1], x[2]}, dim);
      });
    }
    if (random_.chance(30)) {
      return add("where, masked_fill", {a, beside(a), mask(values_[a].sizes().vec())},
                 [](const Tensors& x) { return torch::where(x[2], x[0], x[1]).masked_fill(x[2], 0.3) + x[0]; });
    }
    const auto dim = random_.below(ndim + 1);
    add(fmt::format("stack {}", dim), {a, alike(a)}, [=](const Tensors& x) { return torch::stack({x[0], x[1]}, dim); });
  }

  void matrix() {
    const auto a = real(2, 3);
    const auto whole = values_[a].sizes().vec();
    const auto last = whole.back(), width = 1 + random_.below(5);
    switch (random_.below(8)) {
      case 0: return add("matmul", {a, leaf({last, width})}, [](const Tensors& x) { return x[0].matmul(x[1]); });
      case 1:
        return add("linear", {a, leaf({width, last}), leaf({width})},
                   [](const Tensors& x) { return torch::linear(x[0], x[1], x[2]); });
      case 2: return add("matrix times vector", {a, leaf({last})}, [](const Tensors& x) { return x[0].matmul(x[1]); });
      case 3:
        return add("layer_norm", {a, leaf({last}), leaf({last})},
                   [last](const Tensors& x) { return torch::layer_norm(x[0], {last}, x[1], x[2]); });
      case 4:
        return add("rms_norm", {a, leaf({last})}, [last](const Tensors& x) { return torch::rms_norm(x[0], {last}, x[1], 0.1); });
      case 5:
        if (whole.size() != 2) return;
        return add("cross_entropy", {a, index({whole[0]}, last)},
                   [](const Tensors& x) { return torch::cross_entropy_loss(x[0], x[1]); });
      case 6:
        if (whole.size() != 3) return;
        return add("conv1d", {a, leaf({width, whole[1], 2})},
                   [](const Tensors& x) { return torch::conv1d(x[0], x[1], {}, 1, 1); });
      default:
        if (whole.size() != 3) return;
        return add("bmm", {a, leaf({whole[0], last, width})}, [](const Tensors& x) { return x[0].bmm(x[1]); });
    }
  }

  void rounding() {
    const auto a = real();
    switch (random_.below(3)) {
      case 0:
        program_.tolerance = std::max(program_.tolerance, 1e-4);
        return add("to float and back", {a}, [](const Tensors& x) { return x[0].to(torch::kFloat).mul(1.5).to(torch::kDouble); });
      case 1:
        program_.tolerance = std::max(program_.tolerance, 0.1);
        return add("to bfloat16 and back", {a}, [](const Tensors& x) { return x[0].to(torch::kBFloat16).to(torch::kDouble); });
      default:
        return add("complex", {a, alike(a)}, [](const Tensors& x) {
          const auto number = torch::complex(x[0], x[1]);
          return torch::real(number * number.conj()) + torch::imag(number * number);
        });
    }
  }

  /// Random numbers are those of one device.
  void drawing() {
    const auto a = real();
    const auto seed = static_cast<uint64_t>(random_.below(1000));
    const auto draw = [&](const char* name, Unary run) {
      add(name, {a}, [=](const Tensors& x) {
        torch::manual_seed(seed);
        return run(x[0]);
      });
    };
    switch (random_.below(4)) {
      // A copy: CUDA's numbers depend on where its memory begins.
      case 0:
        return draw("dropout", [](const Tensor& x) { return torch::dropout(x.clone(at::MemoryFormat::Contiguous), 0.3, true); });
      case 1: return draw("randn_like", [](const Tensor& x) { return torch::randn_like(x.contiguous()) * x; });
      case 2: return draw("bernoulli", [](const Tensor& x) { return torch::bernoulli(x.detach().contiguous().sigmoid()); });
      default: return draw("rand_like", [](const Tensor& x) { return torch::rand_like(x.contiguous()) + x; });
    }
  }

  /// Programs do not write what a layout step read: it may be a copy there, and the same memory here.
  bool frozen(size_t slot) const {
    return std::any_of(frozen_.begin(), frozen_.end(),
                       [&](size_t other) { return values_[slot].storage().is_alias_of(values_[other].storage()); });
  }

  void writing() {
    const auto& op = random_.of(writing_ops());
    auto a = real();
    if (values_[a].is_leaf() && values_[a].requires_grad()) {
      add("clone", {a}, [](const Tensors& x) { return x[0].clone(); });
      a = values_.size() - 1;
    }
    if (frozen(a)) return;
    add({op.name, {a, alike(a)}, [run = op.run](const Stage&, const Tensors& x) {
           run(x[0], x[1]);
           return Tensors{};
         }});
  }

  /// What is the identity, or a function of the elements, on plain tensors.
  void layout() {
    const auto a = real();
    const auto whole = values_[a].sizes().vec();
    const auto to = draw_placements(random_, whole, mesh_shape_, true);
    const auto line = draw_placements(random_, whole, {internal::product(mesh_shape_, 0, mesh_shape_.size())}, true);
    const auto step = [&](const char* name, Unary plain, const std::function<Tensor(const Stage&, const DTensor&)>& moved) {
      const bool added = add({name + tessera::to_string(to), {a}, [=](const Stage& stage, const Tensors& x) {
                                return Tensors{stage.mesh ? moved(stage, DTensor(x[0])) : plain(x[0])};
                              }});
      if (!added) return;
      frozen_.push_back(a);
      frozen_.push_back(values_.size() - 1);
    };
    const Unary same = [](const Tensor& x) { return x * 1; };
    const Unary sine = [](const Tensor& x) { return x.sin(); };
    switch (random_.below(9)) {
      case 0: return step("redistribute ", same, [to](const Stage&, const DTensor& x) { return x.redistribute(to) * 1; });
      case 1:
        return step("there and back ", sine, [to, line](const Stage& stage, const DTensor& x) -> Tensor {
          return DTensor(x.redistribute(*stage.line, line).sin()).redistribute(*stage.mesh, to);
        });
      case 2:
        return step("redistribute_async ", same, [to](const Stage&, const DTensor& x) {
          auto pending = x.redistribute_async(to);
          (void)(x * 2);
          return pending.wait() * 1;
        });
      case 3: {
        const Unary dense = [](const Tensor& x) { return x * 2; };
        const auto twice =
            random_.of(std::vector<Unary>{dense, dense, twice_with_gaps, twice_at_every_second, twice_with_gaps_amid});
        return step("to_local, from_local ", twice, [whole, twice](const Stage& stage, const DTensor& x) -> Tensor {
          const auto spread = x.redistribute(linear_in(x.placements()));
          return from_local(twice(to_local(spread)), *stage.mesh, spread.placements(), whole);
        });
      }
      case 4:
        return step("local_map ", sine, [to, whole](const Stage&, const DTensor& x) -> Tensor {
          const auto placements = replicate_partial(to);
          return local_map([](const Tensors& t) { return Tensors{t[0].sin()}; }, {placements}, {placements}, {whole})({x})[0];
        });
      case 5:
        program_.tolerance = std::max(program_.tolerance, 1e-4);
        return step(
            "redistribute in float ", [](const Tensor& x) { return x.to(torch::kFloat).to(torch::kDouble); },
            [to](const Stage&, const DTensor& x) {
              return x.redistribute(to, {.forward_dtype = torch::kFloat, .backward_dtype = torch::kFloat}).to(torch::kDouble);
            });
      case 6: return hook(a);
      case 7: return running_again(a);
      default:
        return step("full_tensor, from_local ", sine, [to](const Stage& stage, const DTensor& x) -> Tensor {
          const Placements everywhere(stage.mesh->ndim());
          return from_local(x.full_tensor().sin(), *stage.mesh, everywhere).redistribute(to);
        });
    }
  }

  static Tensor twice_with_gaps(const Tensor& x) {
    if (x.dim() == 0) return x * 2;
    return torch::cat({x * 2, x}, -1).narrow(-1, 0, x.size(-1));
  }

  static Tensor twice_at_every_second(const Tensor& x) { return torch::stack({x * 2, x}, -1).select(-1, 0); }

  static Tensor twice_with_gaps_amid(const Tensor& x) {
    return x.dim() < 2 ? x * 2 : torch::cat({x * 2, x}, 1).narrow(1, 0, x.size(1));
  }

  /// A hook that writes a tensor of the program, and returns what it has summed up.
  void hook(size_t a) {
    const auto whole = values_[a].sizes().vec();
    const auto placements = draw_placements(random_, whole, mesh_shape_, false);
    add({"hook, sum " + tessera::to_string(placements), {a}, [=](const Stage& stage, const Tensors& x) {
           const auto zeros = torch::zeros(whole, torch::kDouble);
           const auto sum = stage.mesh ? Tensor(make(zeros, *stage.mesh, placements)) : zeros.to(stage.device);
           const auto y = x[0] * 1;
           y.register_hook([sum](const Tensor& gradient) {
             const at::NoGradGuard no_grad;
             return sum.add_(gradient).clone();
           });
           return Tensors{y};
         }});
  }

  /// A function that runs again in backward, and looks at this rank's part of what it wrote.
  void running_again(size_t a) {
    const auto whole = values_[a].sizes().vec();
    const auto placements = draw_placements(random_, whole, mesh_shape_, false);
    const auto b = alike(a);
    const bool added = add({"recompute " + tessera::to_string(placements), {a, b}, [=](const Stage& stage, const Tensors& x) {
                              const auto sine = [=](const Tensor& x, const Tensor& y) {
                                auto sum = x * 1;
                                sum.add_(y);
                                if (!stage.mesh) return sum.sin();
                                return Tensor(from_local(to_local(sum).sin(), *stage.mesh, placements, whole));
                              };
                              const auto first = stage.mesh ? Tensor(DTensor(x[0]).redistribute(placements)) : x[0];
                              return Tensors{recompute(sine, first, x[1])};
                            }});
    if (added) frozen_.insert(frozen_.end(), {a, b, values_.size() - 1});
  }

  /// Doubling the parts doubles the value.
  static Placements linear_in(Placements placements) {
    for (auto& placement : placements) {
      const auto* partial = std::get_if<Partial>(&placement);
      if (partial && (partial->op == Partial::Op::kProduct || partial->op == Partial::Op::kNorm)) placement = Replicate{};
    }
    return placements;
  }

  Random random_;
  Sizes mesh_shape_;
  Program program_;
  Tensors values_;
  std::vector<size_t> frozen_;
  bool writes_ = false, layouts_ = false;
};

} // namespace

Program draw_program(uint64_t seed, const Sizes& mesh_shape) { return Drawing(seed, mesh_shape).run(); }

} // namespace tessera::testing
