#include "gather.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace padam {

namespace {

py::object checked(PyObject* new_reference) {
  if (new_reference == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(new_reference);
}

// Calls an unbound method of torch.Tensor without arguments.
py::object call(const py::object& method, PyObject* tensor) {
  return checked(PyObject_Vectorcall(method.ptr(), &tensor, 1, nullptr));
}

// The objects of a thousand parameters, some 200 bytes here and there for each, have left the
// caches since the last step; waiting for memory is most of the time spent here. Prefetching never
// faults, so it does not matter whether a place is still what it was.
constexpr std::size_t kPrefetchAhead = 8;

void prefetch(const void* place) {
  const char* line = static_cast<const char*>(place);
  __builtin_prefetch(line - 64);
  __builtin_prefetch(line);
  __builtin_prefetch(line + 64);
}

// The values as bytes: those of the last pass where they say the same.
py::bytes as_bytes(const std::vector<std::int64_t>& values, const py::handle& then = {}) {
  const std::string_view all(reinterpret_cast<const char*>(values.data()),
                             values.size() * sizeof(std::int64_t));
  if (then && py::isinstance<py::bytes>(then) &&
      py::reinterpret_borrow<py::bytes>(then).operator std::string_view() == all) {
    return py::reinterpret_borrow<py::bytes>(then);
  }
  return {all.data(), all.size()};
}

// The parameters that have a gradient, and their groups. As long as they are those of the last
// pass no list is made; most steps hand out the last one's.
class Members {
 public:
  explicit Members(const py::handle& then)
      : then_params_(then.is_none() ? py::list() : py::cast<py::list>(then.attr("params"))),
        then_groups_(then.is_none() ? py::list() : py::cast<py::list>(then.attr("group_indices"))) {
  }

  void add(const py::handle& param, const py::int_& group) {
    if (same_ && count_ < then_params_.size() &&
        PyList_GET_ITEM(then_params_.ptr(), count_) == param.ptr() &&
        PyList_GET_ITEM(then_groups_.ptr(), count_) == group.ptr()) {
      ++count_;
      return;
    }
    if (same_) part();
    params_.append(param);
    groups_.append(group);
  }

  // Must be called once, after the last one.
  std::pair<py::list, py::list> lists() {
    if (same_ && count_ == then_params_.size()) return {then_params_, then_groups_};
    if (same_) part();
    return {params_, groups_};
  }

 private:
  void part() {
    const auto begin = [&](const py::list& list) {
      return checked(PyList_GetSlice(list.ptr(), 0, static_cast<py::ssize_t>(count_)));
    };
    params_ = begin(then_params_);
    groups_ = begin(then_groups_);
    same_ = false;
  }

  py::list then_params_;
  py::list then_groups_;
  py::list params_;
  py::list groups_;
  std::size_t count_ = 0;  // of those that are the same
  bool same_ = true;
};

}  // namespace

// `before` is what was read of this very object in the last pass, or null: torch lets go of the GIL
// to tell whether a tensor is lazily negated, half the price of a reading, and an object that is
// still at its address is as negated as it was. (It would take `.data = torch._neg_view(...)` of
// the same memory to be wrong.)
Gatherer::Seen Gatherer::read(PyObject* tensor, const py::object& dtensor, const Seen* before,
                              Reading& reading) const {
  if (is_dtensor(tensor, dtensor)) {
    // Mesh and placements, in a hash that torch keeps.
    reading.layouts.push_back(py::hash(checked(PyObject_GetAttr(tensor, spec_.ptr()))));
  }
  const py::object keep = local(tensor, dtensor);
  PyObject* const read_from = keep.ptr();
  constexpr std::uint8_t kComplex = 5;  // DLPack's kDLComplex
  DLTensor read;
  if (api_->dltensor_from_py_object_no_sync(read_from, &read) != 0) throw py::error_already_set();
  const auto address =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(read.data) + read.byte_offset);
  reading.addresses.push_back(address);
  std::vector<std::int64_t>& layouts = reading.layouts;
  layouts.push_back((static_cast<std::int64_t>(read.device.device_type) << 32) |
                    read.device.device_id);
  layouts.push_back((static_cast<std::int64_t>(read.ndim) << 32) | (read.dtype.code << 16) |
                    read.dtype.bits);
  layouts.insert(layouts.end(), read.shape, read.shape + read.ndim);
  layouts.insert(layouts.end(), read.strides, read.strides + read.ndim);
  const bool is_negated = before != nullptr && before->address == address
                              ? before->is_negated
                              : call(is_neg_, read_from).ptr() == Py_True;
  layouts.push_back(is_negated);
  if (read.dtype.code == kComplex) {
    layouts.push_back(call(is_conj_, read_from).ptr() == Py_True);
  }
  return {tensor, read.shape, address, is_negated};
}

Gatherer::Gatherer(const py::object& tensor_class)
    : is_neg_(tensor_class.attr("is_neg")),
      is_conj_(tensor_class.attr("is_conj")),
      data_ptr_(tensor_class.attr("data_ptr")),
      grad_(py::str("grad")),
      local_tensor_(py::str("_local_tensor")),
      spec_(py::str("_spec")) {
  const py::object capsule = tensor_class.attr("__dlpack_c_exchange_api__");
  api_ = static_cast<const DLPackExchangeAPI*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (api_ == nullptr) throw py::error_already_set();
  if (api_->version.major != 1 || api_->dltensor_from_py_object_no_sync == nullptr) {
    throw std::invalid_argument("torch offers DLPack " + std::to_string(api_->version.major) +
                                " where version 1 is needed");
  }
}

bool Gatherer::is_dtensor(PyObject* tensor, const py::object& dtensor) const {
  return !dtensor.is_none() &&
         PyObject_TypeCheck(tensor, reinterpret_cast<PyTypeObject*>(dtensor.ptr())) != 0;
}

py::object Gatherer::local(PyObject* tensor, const py::object& dtensor) const {
  if (!is_dtensor(tensor, dtensor)) return py::reinterpret_borrow<py::object>(tensor);
  return checked(PyObject_GetAttr(tensor, local_tensor_.ptr()));
}

// A gradient must not be kept alive, and another may lie where one was freed.
bool Gatherer::is_same_grad(const SeenPair& before, PyObject* grad) {
  if (!before.grad_ref) return false;
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* now = nullptr;
  PyWeakref_GetRef(before.grad_ref.ptr(), &now);
  const py::object keep = py::reinterpret_steal<py::object>(now);
#else
  PyObject* now = PyWeakref_GetObject(before.grad_ref.ptr());
#endif
  // Where every step has new gradients, references to them are not worth their price.
  if (now == nullptr || now == Py_None) grads_move_ = true;
  return now == grad;
}

py::tuple Gatherer::gather(const py::list& param_lists, const py::object& then,
                           const py::object& dtensor) {
  Members members(then);
  py::list grads;
  // Taken out and put back: while torch is asked, another thread may make a pass, and begins anew.
  std::vector<SeenPair> all_seen = std::exchange(seen_, {});
  Reading read_params = std::exchange(params_, {});
  Reading read_grads = std::exchange(grads_, {});
  read_params.clear();
  read_grads.clear();
  bool readable = true;
  std::size_t count = 0;  // of those read so far; what all_seen has behind that is of the last pass
  for (std::size_t group = 0; group < param_lists.size(); ++group) {
    if (group == group_indices_.size()) group_indices_.emplace_back(group);
    const py::int_ group_index = group_indices_[group];
    for (const py::handle param : py::cast<py::list>(param_lists[group])) {
      if (count + kPrefetchAhead < all_seen.size()) {
        const SeenPair& ahead = all_seen[count + kPrefetchAhead];
        for (const Seen* one : {&ahead.param, &ahead.grad}) {
          prefetch(one->object);
          prefetch(one->place);
        }
      }
      const py::object grad = checked(PyObject_GetAttr(param.ptr(), grad_.ptr()));
      if (grad.is_none()) continue;
      members.add(param, group_index);
      grads.append(grad);
      if (!readable) continue;
      try {
        if (count == all_seen.size()) all_seen.emplace_back();
        SeenPair& seen = all_seen[count];
        // Parameters live on in `then`, so that one at the same place is the same.
        const bool same = seen.param.object == param.ptr();
        const bool same_grad = is_same_grad(seen, grad.ptr());
        seen.param = read(param.ptr(), dtensor, same ? &seen.param : nullptr, read_params);
        if (seen.grad.object != grad.ptr() || grads_move_) {
          seen.grad_ref = {};
        } else if (!same_grad) {
          seen.grad_ref = checked(PyWeakref_NewRef(grad.ptr(), nullptr));
        }
        seen.grad = read(grad.ptr(), dtensor, same_grad ? &seen.grad : nullptr, read_grads);
        ++count;
      } catch (const py::error_already_set&) {
        readable = false;  // a sparse gradient, say; whoever makes buckets says what is wrong
      }
    }
  }
  all_seen.resize(count);
  seen_ = std::move(all_seen);
  const auto [params, group_indices] = members.lists();
  if (!readable) return py::make_tuple(params, grads, group_indices);
  const py::object none = py::none();
  const py::object then_param = then.is_none() ? none : then.attr("param_reading");
  const py::object then_grad = then.is_none() ? none : then.attr("grad_layouts");
  py::tuple reading = then_param.is_none() ? py::make_tuple(none, none) : py::tuple(then_param);
  const py::bytes addresses = as_bytes(read_params.addresses, reading[0]);
  const py::bytes layouts = as_bytes(read_params.layouts, reading[1]);
  const py::bytes grad_layouts = as_bytes(read_grads.layouts, then_grad);
  const py::bytes grad_addresses = as_bytes(read_grads.addresses);
  const auto nulls = std::count(read_grads.addresses.begin(), read_grads.addresses.end(), 0);
  params_ = std::move(read_params);
  grads_ = std::move(read_grads);
  return py::make_tuple(params, grads, group_indices, py::make_tuple(addresses, layouts),
                        grad_layouts, grad_addresses, nulls);
}

py::bytes Gatherer::state_addresses(const py::list& states, const py::tuple& keys,
                                    const py::object& dtensor) const {
  std::vector<std::int64_t> addresses;
  addresses.reserve(states.size() * keys.size());
  for (const py::handle state : states) {
    if (!PyDict_Check(state.ptr())) throw py::type_error("a state is not a dict");
    for (const py::handle key : keys) {
      PyObject* value = PyDict_GetItemWithError(state.ptr(), key.ptr());
      if (value == nullptr) {
        if (PyErr_Occurred() != nullptr) throw py::error_already_set();
        throw py::key_error(py::cast<std::string>(key));
      }
      const py::object address = call(data_ptr_, local(value, dtensor).ptr());
      addresses.push_back(static_cast<std::int64_t>(PyLong_AsUnsignedLongLong(address.ptr())));
    }
  }
  return as_bytes(addresses);
}

}  // namespace padam
