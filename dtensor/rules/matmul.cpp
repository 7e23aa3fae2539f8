#include <tessera/dtensor/rules/factors.h>
#include <tessera/dtensor/rules/registry.h>

namespace tessera::rules {

namespace {

struct Line {
  std::string_view name;
  std::string_view equation;
  uint64_t additive = 0; ///< inputs that are added to the product
  bool no_empty = false; ///< the kernel gets the shape of an empty product wrong
};

constexpr Line kLines[] = {
    {"mm", "mk,kn->mn"},
    {"bmm", "bmk,bkn->bmn"},
    {"mv", "mk,k->m"},
    {"dot vdot", "k,k->"},
    {"ger", "m,n->mn"},
    {"addmm", "mn,mk,kn->mn", 1},
    {"addmv", "m,mk,k->m", 1, true},
    {"addr", "mn,m,n->mn", 1},
    {"baddbmm", "bmn,bmk,bkn->bmn", 1},
    {"addbmm", "mn,bmk,bkn->mn", 1},
};

} // namespace

void register_matmul(Registry& registry) {
  for (const auto& line : kLines) {
    registry.add(line.name, {.factorize = [&line](const OpCall& call) {
                   auto factors = einsum_factors(call, line.equation, line.additive);
                   for (auto& factor : factors.factors) factor.no_empty = line.no_empty;
                   return factors;
                 }});
  }
}

} // namespace tessera::rules
