// What a step has to know about its tensors, read in one pass over Python objects. padam_ext's
// gather.py does the same in Python, for versions of torch without DLPack's C exchange interface.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "dlpack_abi.h"

namespace padam {

namespace py = pybind11;

// Reads tensors through torch.Tensor.__dlpack_c_exchange_api__ and a few methods.
class Gatherer {
 public:
  // Takes torch.Tensor. Throws AttributeError where it has no exchange interface and
  // std::invalid_argument for a version of it that is not known here.
  explicit Gatherer(const py::object& tensor_class);

  // For lists of parameters, one list per group, the fields of gather.py's Live: parameters with
  // a gradient, gradients, groups, then, unless a tensor cannot be read, the parameters'
  // (addresses, layouts), the gradients' layouts and the gradients' addresses, all of these as
  // bytes of int64, and how many of the last are null. `then` is the Live of an earlier pass, or
  // None; what is the same as there is handed out again, the same objects. `dtensor` is the class
  // whose instances are read as the local tensors in them, or None.
  py::tuple gather(const py::list& param_lists, const py::object& then, const py::object& dtensor);

  // The addresses of the tensors in dicts, state by state, key by key, as bytes of int64.
  // Throws KeyError for a key that is missing, TypeError for a value that is no tensor.
  py::bytes state_addresses(const py::list& states, const py::tuple& keys,
                            const py::object& dtensor) const;

 private:
  bool is_dtensor(PyObject* tensor, const py::object& dtensor) const;
  // The tensor, or the local one in a DTensor.
  py::object local(PyObject* tensor, const py::object& dtensor) const;

  // What a pass keeps of a tensor for the next one.
  struct Seen {
    PyObject* object = nullptr;
    const void* place = nullptr;  // inside the tensor's own memory
    std::int64_t address = 0;
    bool is_negated = false;
  };
  struct SeenPair {
    Seen param;
    Seen grad;
    py::object grad_ref;  // a weak one, or null: whether the gradient still is that object
  };
  // What is read of a list of tensors.
  struct Reading {
    std::vector<std::int64_t> addresses;
    std::vector<std::int64_t> layouts;

    void clear() {
      addresses.clear();
      layouts.clear();
    }
  };

  bool is_same_grad(const SeenPair& before, PyObject* grad);
  Seen read(PyObject* tensor, const py::object& dtensor, const Seen* before,
            Reading& reading) const;

  const DLPackExchangeAPI* api_;
  py::object is_neg_;
  py::object is_conj_;
  py::object data_ptr_;
  py::str grad_;
  py::str local_tensor_;
  py::str spec_;
  std::vector<SeenPair> seen_;
  std::vector<py::int_> group_indices_;  // the same objects in each pass
  Reading params_;                       // kept for their memory, like grads_
  Reading grads_;
  bool grads_move_ = false;  // a gradient that was there twice was gone the third time
};

}  // namespace padam
