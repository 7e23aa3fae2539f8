#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/registry.h>

namespace tessera::internal::rules {

namespace {

struct Line {
  std::string_view name;
  std::string_view equation;
  IndexSet additive = {};              ///< inputs that are added to the product
  SplitLimit limit = SplitLimit::kAny; ///< kNonEmpty: the kernel gets the shape of an empty product wrong
};

constexpr Line kLines[] = {
    {"mm", "mk,kn->mn"},
    {"bmm", "bmk,bkn->bmn"},
    {"mv", "mk,k->m"},
    {"dot vdot", "k,k->"},
    {"ger", "m,n->mn"},
    {"addmm", "mn,mk,kn->mn", {0}},
    {"addmv", "m,mk,k->m", {0}, SplitLimit::kNonEmpty},
    {"addr", "mn,m,n->mn", {0}},
    {"baddbmm", "bmn,bmk,bkn->bmn", {0}},
    {"addbmm", "mn,bmk,bkn->mn", {0}},
};

} // namespace

void register_matmul(Registry& registry) {
  for (const auto& line : kLines) {
    registry.add(line.name, OnLocals([&line](const OpCall& call) {
                   auto factors = einsum_factors(call, line.equation, line.additive);
                   for (auto& factor : factors.factors) factor.limit = line.limit;
                   return factors;
                 }));
  }
}

} // namespace tessera::internal::rules
