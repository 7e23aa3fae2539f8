#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

/// A link in Hockney's model: a message of n bytes takes alpha + n × beta seconds. Links carry both directions at once.
struct Link {
  /// In which order the ranks at the ends of such links exchange their parts.
  enum class Algorithm {
    kRing,     ///< in n - 1 steps, with neighbours alone
    kRecursive ///< in log2 n steps of doubled (or halved) size, as trees and NCCL's PAT take
  };

  double alpha = 0; ///< seconds a message
  double beta = 0;  ///< seconds a byte
  Algorithm algorithm = Algorithm::kRing;
};

/// The machines of a simulated job. Ranks are on nodes in their order: the first `ranks_per_node` on the first.
struct Topology {
  int64_t ranks = 1; ///< of the job
  int64_t ranks_per_node = 1;
  Link in_node;       ///< of each rank, to the others of its node
  Link between_nodes; ///< of each node: its ranks share it

  /// {"ranks": 64, "ranks_per_node": 8, "in_node": {"alpha": 3e-6, "beta": 2.5e-12, "algorithm": "ring"},
  ///  "between_nodes": {"alpha": 1e-5, "beta": 2.5e-12, "algorithm": "recursive"}}. A link that is left out costs nothing; its
  /// algorithm is "ring" where that is left out. An error that says where for anything else.
  static Topology from_json(std::string_view text);
  /// Reads a file that holds such a text.
  static Topology read(const std::string& file);
  std::string to_json() const;

  /// Throws what is wrong with it: no ranks, or a time that is negative or no number.
  void check() const;
};

} // namespace tessera
