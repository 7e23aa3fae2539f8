#pragma once

#include <tessera/collectives/topology.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

/// The machines that a training is planned for. All hosts and ranks are alike.
struct Machine {
  /// The processor that ranks compute on. A CPU keeps freed communication buffers (BlockCache), and its cores carry what its
  /// ranks send.
  enum class Device { kCpu, kCuda };

  std::string name = "machine";
  int64_t hosts = 1;
  int64_t ranks_a_host = 1;
  Device device = Device::kCuda;
  int64_t memory = 0;              ///< bytes of a rank that tensors may take
  int64_t host_memory = 0;         ///< bytes of a host for what its ranks offload; 0: unknown, and no limit
  double fp32_flops = 0;           ///< floating-point operations a second of a rank's matrix products in fp32
  double bf16_flops = 0;           ///< the same in bf16; 0: as in fp32
  double float8_flops = 0;         ///< the same in fp8; 0: as in bf16
  double efficiency = 1;           ///< the share of these that whole matrix products reach
  double attention_efficiency = 0; ///< the share that attention's kernels reach; 0: as efficiency
  double memory_bandwidth = 0;     ///< bytes a second that a rank reads and writes
  double launch_seconds = 0;       ///< of an operator, before it computes, and of autograd for it
  double dtensor_seconds = 0;      ///< of one on DTensors besides, as under tensor parallelism
  double host_bandwidth = 0;       ///< bytes a second between a rank and its host, for offload; 0: as memory_bandwidth
  Link in_host = {};               ///< of each rank to the others of its host
  Link between_hosts = {};         ///< of each host, whose ranks share it

  int64_t ranks() const { return hosts * ranks_a_host; }
  /// Returns the same machine with so many ranks: on one host as far as they fit, otherwise on whole hosts. An error where they
  /// fill no whole number of hosts.
  Machine with_ranks(int64_t ranks) const;
  /// Its links, for `init_simulated_process_group`.
  Topology topology() const;

  /// {"name": "8 x H100", "hosts": 8, "ranks_a_host": 8, "device": "cuda", "memory_bytes": 80e9, "host_memory_bytes": 2e12,
  ///  "flops_per_second": {"fp32": 67e12, "bf16": 989e12, "fp8": 1979e12}, "efficiency": 0.7, "attention_efficiency": 0.35,
  ///  "memory_bytes_per_second": 3.35e12, "launch_seconds": 5e-6, "dtensor_seconds": 0, "host_bytes_per_second": 5e10, "in_host":
  ///  {"alpha": 3e-6, "beta": 2.8e-12, "algorithm": "ring"}, "between_hosts": {"alpha": 1e-5, "beta": 2.5e-12, "algorithm":
  ///  "recursive"}}. memory_bytes, flops_per_second with fp32 and
  /// memory_bytes_per_second must be there, and a link where there is more than one rank for it. Errors (c10::ValueError) name
  /// `source` and the key: one that is missing, unknown (with the nearest one), of another type, or a rate that is not positive.
  static Machine from_json(std::string_view text, const std::string& source = "machine");
  static Machine read(const std::string& file);
  std::string to_json() const;
  /// Throws what is wrong with it, in the words of the JSON's keys.
  void check(const std::string& source = "machine") const;
};

/// What `measure_machine` runs.
struct MeasureOptions {
  int64_t product_size = 512;       ///< rows and columns of the matrices whose product is timed
  int64_t operator_bytes = 4 << 20; ///< of the tensors of the other operators that are timed
  int repetitions = 20;             ///< of each; the fastest counts
  int64_t message_bytes = 4 << 20;  ///< of the longest collective
};

/// This machine, measured on its CPU: matrix products in fp32 and bf16, attention; a copy, a sum, gelu, a softmax and a layer
/// norm, for the bytes a second; small layers forward and backward, for the launch, and the same on DTensors; and on two ranks or
/// more the link, whose alpha and beta are the least squares of all-gathers of several sizes on the ranks of the job. `hosts` is
/// 1 and `ranks_a_host` the job's. memory is that of the host (or its control group) over its ranks. Every rank calls it, all
/// take the slowest rank's numbers; nothing else should run.
Machine measure_machine(const MeasureOptions& options = {});

} // namespace tessera
