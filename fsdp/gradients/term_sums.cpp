#include <tessera/fsdp/gradients/term_sums.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <tessera/mesh/device_mesh.h>

namespace tessera::internal {

namespace {

/// A term, and what the order of all is made of, which is the same on every rank.
struct Term {
  ReadyGradient* gradient;
  std::string name;

  at::Tensor local() const { return dtensor_meta(gradient->value)->local; }
  const DeviceMesh& mesh() const { return gradient->group->parameters()[gradient->index].forward.parallel->mesh(); }
  bool sums_with(const Term& other) const {
    return mesh() == other.mesh() && local().scalar_type() == other.local().scalar_type();
  }
};

void sum_together(const std::vector<Term>& terms) {
  const auto& mesh = terms.front().mesh();
  std::vector<at::Tensor> flat;
  for (const auto& term : terms) flat.push_back(term.local().reshape({-1}).to(mesh.device()));
  const auto all = at::cat(flat);
  if (all.numel() == 0) return; // on all ranks: they have the same parts
  const auto label = "the gradients of " + terms.front().name + (terms.size() > 1 ? " and others" : "");
  mesh.communicator()->all_reduce(all, ReduceOp::kSum, label).wait();
  int64_t offset = 0;
  for (const auto& term : terms) {
    auto local = term.local();
    local.copy_(all.narrow(0, offset, local.numel()).view(local.sizes()));
    offset += local.numel();
  }
}

} // namespace

void sum_terms(ReadyGradients& ready) {
  const at::NoGradGuard no_grad;
  std::vector<Term> terms;
  for (auto& each : ready) {
    if (std::exchange(each.is_term, false)) terms.push_back({&each, each.group->full_name(each.index)});
  }
  std::stable_sort(terms.begin(), terms.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  while (!terms.empty()) {
    const auto first = terms.front();
    const auto others =
        std::stable_partition(terms.begin(), terms.end(), [&](const auto& term) { return term.sums_with(first); });
    sum_together({terms.begin(), others});
    terms.erase(terms.begin(), others);
  }
}

} // namespace tessera::internal
