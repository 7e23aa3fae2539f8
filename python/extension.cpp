// The extension module tessera_backend._extension.
#include <tessera/collectives/backends/store_communicator.h>
#include <tessera/collectives/ranks/job_environment.h>
#include <tessera/collectives/trace/recording_communicator.h>

#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <utility>

#include "communicator_backend.h"
#include "process_trace.h"

namespace tessera::python {

namespace {

namespace py = pybind11;
using c10d::Backend, c10d::DistributedBackendOptions;
using std::chrono::milliseconds;

CommunicatorPtr make_communicator(const internal::StoreGroup& group) {
  const auto connect = [&] { return internal::make_communicator(group, at::kCPU); };
  auto trace = process_trace();
  if (!trace || group.ranks.size() == 1) return connect(); // alone it waits for nobody
  internal::RecordedGroup recorded{.name = group.name, .device = "cpu", .ranks = group.ranks, .rank = group.rank};
  return internal::make_recorded(std::move(trace), std::move(recorded), connect);
}

/// A very long one, as `timedelta.max`, is negative when it comes here: pybind11 counts its microseconds.
milliseconds limited(milliseconds timeout) {
  const milliseconds longest = internal::kLongestTimeout;
  return timeout.count() < 0 ? longest : std::min(timeout, longest);
}

/// What `torch.distributed` calls for every new group, on each of its ranks. Returns when all of them have come.
c10::intrusive_ptr<Backend> make_backend(const DistributedBackendOptions& group, const py::object& /*pg_options*/) {
  const py::gil_scoped_release no_gil;
  internal::StoreGroup description{.store = group.store, .name = group.group_id, .ranks = group.global_ranks_in_group};
  description.rank = group.group_rank;
  description.ranks.resize(static_cast<size_t>(group.group_size));
  if (group.global_ranks_in_group.empty()) { // that of all ranks
    std::iota(description.ranks.begin(), description.ranks.end(), 0);
    begin_process_trace(*group.store, group.group_rank, group.group_size);
  }
  description.options = internal::with_overrides({}, internal::current_environment());
  description.options.timeout = limited(std::chrono::ceil<milliseconds>(group.timeout));
  auto options = c10::make_intrusive<Backend::Options>("tessera", description.options.timeout);
  options->group_name = group.group_id;
  options->global_ranks_in_group.assign(description.ranks.begin(), description.ranks.end());
  return c10::make_intrusive<CommunicatorBackend>(make_communicator(description), options);
}

} // namespace

PYBIND11_MODULE(_extension, module) {
  module.def("make_backend", &make_backend, py::arg("group"), py::arg("pg_options") = py::none());
}

} // namespace tessera::python
