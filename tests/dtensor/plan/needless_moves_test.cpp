// The truth table of the rules, by brute force: each operator of the exported OpInfo calls runs on the parts that two ranks would
// hold, for every product of Replicate, Shard and Partial over its arguments. Where the parts of the results are again a
// Replicate, Shard or Partial, that signature is valid. What the rules make of the same arguments has to be right, and a valid
// signature for which they redistribute is listed in the report.
#include <fmt/format.h>
#include <tessera/dtensor/debug.h>
#include <tessera/dtensor/strict_sharding.h>

#include <fstream>
#include <iostream>
#include <map>

#include <tessera/tests/dtensor/layouts.h>
#include <tessera/tests/dtensor/opinfo/opinfo_replay.h>

namespace tessera::testing::needless_moves_test {
namespace {

using at::Tensor;

constexpr int64_t kRanks = 2;

bool is_real(const Tensor& tensor) { return at::isFloatingType(tensor.scalar_type()); }

/// The placements that a tensor may have. Partial tensors of other types than real ones are not sums of parts in general.
std::vector<Placement> choices(const Tensor& tensor) {
  using Op = Partial::Op;
  std::vector<Placement> result{Replicate{}};
  for (const auto& shard : shards(tensor.sizes().vec())) result.push_back(shard);
  if (!is_real(tensor)) return result;
  for (const auto op : {Op::kSum, Op::kAvg, Op::kMin, Op::kMax, Op::kMask}) result.emplace_back(Partial{op});
  return result;
}

/// 1 in every second element, another half on each rank.
Tensor every_other(const Tensor& whole, int64_t rank) {
  return torch::arange(rank, rank + whole.numel()).remainder(2).view(whole.sizes()).to(whole.dtype());
}

/// What `rank` holds of `whole`.
Tensor part_of(const Tensor& whole, const Placement& placement, int64_t rank) {
  if (const auto* shard = std::get_if<Shard>(&placement)) {
    const auto chunks = whole.chunk(kRanks, shard->dim);
    return (rank < static_cast<int64_t>(chunks.size()) ? chunks[rank] : whole.narrow(shard->dim, 0, 0)).clone();
  }
  if (is_replicate(placement)) return whole.clone();
  switch (std::get<Partial>(placement).op) {
    case Partial::Op::kSum: return rank == 0 ? whole - 1 : torch::ones_like(whole);
    case Partial::Op::kAvg: return rank == 0 ? whole * 2 - 1 : torch::ones_like(whole);
    case Partial::Op::kMin: return whole + every_other(whole, rank);
    case Partial::Op::kMask: return torch::where(every_other(whole, rank).ne(0), whole, torch::zeros_like(whole));
    default: return whole - every_other(whole, rank);
  }
}

bool same(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && a.dtype() == b.dtype() && bool(tensors_close(a, b, 1e-6, 1e-7));
}

/// True where `parts` are `whole` under some placement.
bool is_some_placement(const std::vector<Tensor>& parts, const Tensor& whole) {
  if (!whole.defined() || !parts[0].defined() || !parts[1].defined()) return false;
  if (whole.is_complex() || parts[0].is_complex() || parts[1].is_complex()) return false;
  if (same(parts[0], whole) && same(parts[1], whole)) return true;
  for (int64_t d = 0; d < whole.dim(); ++d) {
    if (same(parts[0], part_of(whole, Shard{d}, 0)) && same(parts[1], part_of(whole, Shard{d}, 1))) return true;
  }
  if (!is_real(whole) || parts[0].sizes() != whole.sizes() || parts[1].sizes() != whole.sizes()) return false;
  const auto sum = parts[0] + parts[1];
  return same(sum, whole) || same(sum / kRanks, whole) || same(torch::minimum(parts[0], parts[1]), whole) ||
         same(torch::maximum(parts[0], parts[1]), whole);
}

/// The outputs of the call on the parts of `rank`; nothing where it refuses them.
std::optional<std::vector<Tensor>> run_parts(const OpCall& call, const std::vector<Placement>& placements, int64_t rank) {
  try {
    at::NoGradGuard no_grad;
    size_t index = 0;
    auto stack =
        with_tensors(call.arguments, [&](const Tensor& tensor) { return part_of(tensor.detach(), placements[index++], rank); });
    torch::manual_seed(3);
    call.op.callBoxed(stack);
    return tensors_of(stack);
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

bool is_valid(const OpCall& call, const std::vector<Placement>& placements, const std::vector<Tensor>& expected) {
  std::vector<std::vector<Tensor>> by_rank;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    auto outputs = run_parts(call, placements, rank);
    if (!outputs || outputs->size() != expected.size()) return false;
    by_rank.push_back(std::move(*outputs));
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!is_some_placement({by_rank[0][i], by_rank[1][i]}, expected[i])) return false;
  }
  return !expected.empty();
}

struct Table {
  std::map<std::string, int> wrong;
  std::map<std::string, std::map<std::string, int>> listed; ///< by operator: valid signatures that the rules do not use
  int64_t products = 0, valid = 0, found = 0;
};

enum class Outcome { kFound, kMoved, kError };

/// False for operators whose kernels write out of bounds where the shapes of their arguments, as parts may, do not fit.
bool checks_its_shapes(const OpCall& call) {
  const auto name = name_of(call.op);
  return name.find("batch_norm") == std::string::npos && name != "aten::linalg_ldl_solve" &&
         name != "aten::max_pool2d_with_indices_backward";
}

/// Runs the rules on the call, and compares.
Outcome run_rules(const OpCall& call, const std::vector<Placements>& placements, const OpResult& expected, const DeviceMesh& mesh,
                  const Agreement& agreement, Table& table) {
  OpResult actual;
  const LogRedistributions log;
  const StrictSharding strict;
  try {
    at::NoGradGuard no_grad;
    actual = run_call(call, {[&](const Tensor& tensor, size_t i) -> Tensor {
                        const auto part = part_of(tensor.detach(), placements[i][0], mesh.local_rank());
                        return from_local(part, mesh, placements[i], tensor.sizes().vec());
                      }});
  } catch (const std::exception&) {
    agreement.everyone(false);
    return Outcome::kError;
  }
  if (!agreement.everyone(true)) return Outcome::kError;
  const bool moved = !log.records().empty();
  const auto text = difference(actual, expected, name_of(call.op).find("empty") == std::string::npos);
  if (!agreement.everyone(text.empty())) ++table.wrong[describe(call, placements) + ": " + text];
  return moved ? Outcome::kMoved : Outcome::kFound;
}

std::string signature(const std::vector<Placement>& placements) {
  return to_string(Placements(placements.begin(), placements.end()));
}

void check_call(const OpCall& call, size_t limit, const DeviceMesh& mesh, const Agreement& agreement, std::mt19937& random,
                Table& table) {
  OpResult expected;
  try {
    at::NoGradGuard no_grad;
    expected = run_call(call, plain_stage());
  } catch (const std::exception&) {
    return;
  }
  std::vector<std::vector<Placement>> options;
  for (const auto& tensor : tensors_of(call.arguments)) options.push_back(choices(tensor));
  for (const auto& picked : pick_products(options, limit, random)) {
    std::vector<Placement> product;
    std::vector<Placements> lists;
    for (size_t i = 0; i < picked.size(); ++i) {
      product.push_back(options[i][picked[i]]);
      lists.push_back({product.back()});
    }
    ++table.products;
    const auto outcome = run_rules(call, lists, expected, mesh, agreement, table);
    if (!checks_its_shapes(call) || !is_valid(call, product, expected.outputs)) continue;
    ++table.valid;
    table.found += outcome == Outcome::kFound ? 1 : 0;
    if (outcome != Outcome::kFound) ++table.listed[name_of(call.op)][signature(product)];
  }
}

void report(const Table& table) {
  if (process_context().rank() != 0) return;
  std::ofstream file(fmt::format("{}/truth-table.txt", std::getenv("TESSERA_OPINFO_CALLS")));
  for (const auto& [text, count] : table.wrong) file << "wrong: " << text << "\n";
  for (const auto& [op, signatures] : table.listed) {
    file << op << ":";
    for (const auto& [text, count] : signatures) file << " " << text;
    file << "\n";
  }
  std::cout << fmt::format("{} signatures, {} wrong; {} valid ones, {} used by the rules, {} listed in truth-table.txt\n",
                           table.products, table.wrong.size(), table.valid, table.found, table.valid - table.found);
}

TEST(TruthTable, RulesAreRightAndMissLittle) {
  if (opinfo_files().empty()) GTEST_SKIP() << "no exported calls";
  const auto mesh = line_mesh();
  const Agreement agreement(mesh);
  std::mt19937 random(1);
  Table table;
  for (const auto& file : sweep(opinfo_files(), 60)) {
    std::map<std::string, size_t> taken;
    for (const auto& call : load_calls(file)) {
      const bool random_draw = call.op.hasSchema() && call.op.operator_name().name.find("rand") != std::string::npos;
      if (!random_draw && taken[name_of(call.op)]++ < (full_run() ? 4U : 1U)) {
        check_call(call, full_run() ? 256 : 24, mesh, agreement, random, table);
      }
    }
  }
  report(table);
  for (const auto& [text, count] : table.wrong) ADD_FAILURE() << text;
  EXPECT_GT(table.valid, 0);
}

} // namespace
} // namespace tessera::testing::needless_moves_test
